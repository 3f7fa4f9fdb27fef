"""A clock that only moves when told."""


class StepClock:
    def __init__(self) -> None:
        self._now_s = 100.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

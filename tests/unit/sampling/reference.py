"""Sampling written down plainly: Python floats, one row, full sorts. Slow on purpose."""

import math

from sampling.params import SamplingParams


def softmax(logits: list[float]) -> list[float]:
    best = max(logits)
    weights = [math.exp(logit - best) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def log_softmax(logits: list[float]) -> list[float]:
    best = max(logits)
    log_total = math.log(math.fsum(math.exp(logit - best) for logit in logits))
    return [logit - best - log_total for logit in logits]


def ranked_ids(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def kept_ids(
    logits: list[float],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> list[int]:
    best = max(logits)
    weight = {i: math.exp((logit - best) / temperature) for i, logit in enumerate(logits)}
    kept = [i for i in ranked_ids(logits) if logits[i] > -math.inf]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1.0:
        total = math.fsum(weight[i] for i in kept)
        nucleus: list[int] = []
        mass = 0.0
        for i in kept:
            if nucleus and mass >= top_p * total:
                break
            nucleus.append(i)
            mass += weight[i]
        kept = nucleus
    kept = [i for i in kept if weight[i] >= min_p * weight[kept[0]]]
    if typical_p < 1.0:
        kept = _typical(kept, weight, typical_p)
    return kept


def _typical(kept: list[int], weight: dict[int, float], typical_p: float) -> list[int]:
    total = math.fsum(weight[i] for i in kept)
    probability = {i: weight[i] / total for i in kept}
    entropy = -math.fsum(p * math.log(p) for p in probability.values() if p > 0.0)
    by_distance = sorted(
        (i for i in kept if probability[i] > 0.0),
        key=lambda i: abs(-math.log(probability[i]) - entropy),
    )
    typical: set[int] = set()
    mass = 0.0
    for i in by_distance:
        if typical and mass >= typical_p:
            break
        typical.add(i)
        mass += probability[i]
    return [i for i in kept if i in typical]


def share_of(
    logits: list[float], order: list[int], temperature: float, token_id: int
) -> tuple[float, float]:
    """Return which uniform numbers draw the token: those in [low, high)."""
    best = max(logits)
    weights = [math.exp((logits[i] - best) / temperature) for i in order]
    total = math.fsum(weights)
    place = order.index(token_id)
    low = math.fsum(weights[:place]) / total
    return low, low + weights[place] / total


def penalized_logits(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    result = []
    for token_id, logit in enumerate(logits):
        value = logit
        if token_id in prompt or token_id in output:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= params.frequency_penalty * output.count(token_id)
        value -= params.presence_penalty * (token_id in output)
        result.append(value)
    return result

"""A store in memory for tests of remote adapters."""

from fsspec.implementations.memory import MemoryFileSystem

from tests.unit.models.adapters.files import safetensors_bytes

CONFIG = b'{"peft_type": "LORA"}'
INTERVAL_S = 30.0
SETTLE_S = 5.0


class Store(MemoryFileSystem):
    """A store in memory, of its own for each test, that counts and fails as it is told."""

    cachable = False
    store = None  # instances have their own
    pseudo_dirs = None

    def __init__(self, **options):
        super().__init__(**options)
        self.store = {}
        self.pseudo_dirs = [""]
        self.calls = []
        # what is called with (call, path) before the call is done
        self.before = lambda call, path: None

    def _do(self, call, path):
        self.calls.append((call, path))
        self.before(call, path)

    def info(self, path, **options):
        self._do("info", path)
        return super().info(path, **options)

    def ls(self, path, detail=True, **options):
        self._do("ls", path)
        return super().ls(path, detail=detail, **options)

    def open(self, path, mode="rb", **options):
        if "r" not in mode:
            return super().open(path, mode, **options)
        self._do("open", path)
        opened = super().open(path, mode, **options)
        return Reader(self, path, opened.getvalue())

    def num(self, call):
        return sum(name == call for name, _ in self.calls)

    def put(self, adapter_id, data=b"weights!", config=CONFIG, **texts):
        self.pipe(f"/root/{adapter_id}/adapter_config.json", config)
        self.pipe(f"/root/{adapter_id}/adapter_model.safetensors", safetensors_bytes(data))
        for name, content in texts.items():
            self.pipe(f"/root/{adapter_id}/{name.replace('__', '.')}", content)


class Reader:
    """A file that is read in small pieces."""

    def __init__(self, store, path, content):
        self._store, self._path, self._content, self._at = store, path, content, 0

    def read(self, size):
        self._store._do("read", self._path)
        piece = self._content[self._at : self._at + min(size, 16)]
        self._at += len(piece)
        return piece

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def find_later(source, clock, later_s=INTERVAL_S, adapter_id="a"):
    clock.advance(later_s)
    return source.find(adapter_id)


def assert_no_residue(tmp_path):
    assert not list((tmp_path / "cache").glob(".tmp*"))

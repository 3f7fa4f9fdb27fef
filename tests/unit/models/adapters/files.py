"""Adapter folders for tests: files of the right form with any contents."""

import json
import time

# More than a tick of the clock that times files: a change within one does not show.
_FILE_CLOCK_TICK_S = 0.02


def safetensors_bytes(data=b"weights!", num_missing_bytes=0):
    """A safetensors file of one tensor, perhaps cut short."""
    tensor = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "t": tensor}).encode()
    whole = len(header).to_bytes(8, "little") + header + data
    return whole[: len(whole) - num_missing_bytes]


def write_adapter(root, adapter_id, data=b"weights!", config=b'{"peft_type": "LORA"}'):
    """Write or overwrite an adapter's folder, in place; an overwriting shows in the times."""
    folder = root / adapter_id
    if folder.exists():
        time.sleep(_FILE_CLOCK_TICK_S)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(data))
    return folder

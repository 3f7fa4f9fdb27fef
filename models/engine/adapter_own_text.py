"""Gives adapters the text that their own tokenizer files describe."""

from __future__ import annotations

import dataclasses

from models.adapters.source import TEXT_NAMES, AdapterContents
from models.adapters.weights import AdapterWeights
from models.text.adapter_text import AdapterTexts, TextFiles


def with_own_text(
    weights: AdapterWeights, contents: AdapterContents, texts: AdapterTexts
) -> AdapterWeights:
    """Return the weights with what spells the adapter's prompts and answers.

    Ids of tokens that it has added are valid in its prompts, also without a tokenizer of its own.

    Args:
        weights: of the adapter.
        contents: of the same version.
        texts: reads tokenizer files.

    Raises:
        AdapterIncompatibleError: these files cannot be used; the reason is one sentence.
        DrainingError: ``texts`` was closed.
    """
    if not contents.texts and not weights.num_added_tokens:
        return weights
    template, config, tokenizer = (contents.texts.get(name, b"") for name in TEXT_NAMES)
    own = texts.read(
        weights.ref.id,
        TextFiles(template=template, config=config, tokenizer=tokenizer),
        num_added_rows=weights.num_added_tokens,
    )
    return dataclasses.replace(
        weights,
        text=own.text,
        num_bytes=weights.num_bytes + own.num_bytes,
        warnings=(*weights.warnings, *own.warnings),
    )

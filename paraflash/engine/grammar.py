"""Grammars that an answer must follow (`SamplingParams.structured_outputs`), through xgrammar.

A grammar is parsed when its request arrives, so that a bad one is refused at once; its token masks are compiled in
the background while the engine steps for other requests, and waited for only when there are none.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from paraflash.config.model import ModelConfig
from paraflash.engine.messages import Int32
from paraflash.engine.request import RequestRefused
from paraflash.engine.sampling_params import StructuredOutputs
from paraflash.engine.tokenizer import load_tokenizer, token_bytes

logger = logging.getLogger("paraflash.grammar")

KEPT_GRAMMARS = 256
COMPILE_THREADS = 2
MARKERS = {text.encode() for text in ("<think>", "</think>", "｜DSML｜")}


class Grammars:
    """Compiles grammars for one tokenizer and model; equal ones are compiled once."""

    def __init__(self, tokenizer_folder: str | Path, model: ModelConfig):
        self._folder, self._model = tokenizer_folder, model
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._kept: OrderedDict[str, Future[Any]] = OrderedDict()
        self._compiler: Any = None
        self._lock = threading.Lock()

    def start(self, spec: StructuredOutputs) -> GrammarState:
        """Begins to compile; raises `RequestRefused` naming structured_outputs if the grammar is wrong."""
        key = json.dumps(vars(spec), sort_keys=True, default=str)
        future = self._kept.pop(key, None)
        if future is None:
            try:
                grammar = parse(spec)
            except Exception as error:  # the library raises RuntimeError and its kin
                raise RequestRefused("structured_outputs", f"structured_outputs: {_sentence(error)}") from None
            future = self._pool.submit(lambda: self._get_compiler().compile_grammar(grammar))
        self._kept[key] = future
        while len(self._kept) > KEPT_GRAMMARS:
            self._kept.popitem(last=False)
        return GrammarState(future, self._model)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _get_compiler(self) -> Any:
        import xgrammar

        with self._lock:
            if self._compiler is None:
                tokens = token_bytes(load_tokenizer(self._folder))
                # Control tokens have no bytes for a grammar to match, so they are never allowed inside one; the
                # markers of thinking and of tool calls are part of what chat grammars spell.
                hidden = {i for i in tokens.special if tokens[i] not in MARKERS}
                vocab = [b"" if i in hidden else data for i, data in enumerate(tokens.table)]
                info = xgrammar.TokenizerInfo(
                    vocab[: self._model.vocab_size],
                    xgrammar.VocabType.RAW,
                    vocab_size=self._model.vocab_size,
                    stop_token_ids=list(self._model.eos_token_ids),
                )
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=COMPILE_THREADS, cache_enabled=False)
            return self._compiler


def parse(spec: StructuredOutputs) -> Any:
    """An xgrammar Grammar. Raises whatever the library says of a wrong one."""
    from xgrammar import Grammar

    if spec.json_object:
        return Grammar.from_json_schema('{"type": "object"}')
    if spec.json is not None:
        return Grammar.from_json_schema(spec.json if isinstance(spec.json, str) else json.dumps(spec.json))
    if spec.regex is not None:
        return Grammar.from_regex(spec.regex)
    if spec.choice is not None:
        if not spec.choice or not all(isinstance(text, str) and text for text in spec.choice):
            raise ValueError(f"choice is {spec.choice!r}; a list of non-empty strings is needed")
        texts = [{"type": "const_string", "value": text} for text in spec.choice]
        return Grammar.from_structural_tag({"type": "structural_tag", "format": {"type": "or", "elements": texts}})
    if spec.structural_tag is not None:
        return Grammar.from_structural_tag(spec.structural_tag)
    return Grammar.from_ebnf(str(spec.grammar))


def _sentence(error: Exception) -> str:
    """The library's message without the place in its source."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    head, _, rest = text.partition(": ")
    return rest if head.startswith("[") and rest else text


class GrammarState:
    """Where one request stands in its grammar."""

    def __init__(self, compiled: Future[Any], model: ModelConfig):
        self._compiled = compiled
        self._model = model
        self._matcher: Any = None
        self.failed: str | None = None  # why the grammar cannot be followed any further

    @property
    def finished(self) -> bool:
        """The answer is complete and its stop token has been taken."""
        return self._matcher is not None and bool(self._matcher.is_terminated())

    def compiled(self) -> bool:
        """Whether `bitmask` answers without a wait."""
        return self._compiled.done()

    def bitmask(self) -> Int32 | None:
        """int32 [ceil(vocab / 32)]: the tokens allowed next. After the end only stop tokens are."""
        words = np.zeros((self._model.vocab_size + 31) // 32, np.int32)
        if self.failed is not None:
            return None
        try:
            if self._matcher is None:
                import xgrammar

                self._matcher = xgrammar.GrammarMatcher(self._compiled.result())
            if not self.finished:
                self._matcher.fill_next_token_bitmask(words[None])
                if not words.any():
                    self.failed = "the grammar lets no token follow"
                    return None
                return words
        except Exception as error:  # one request must not end the engine
            logger.exception("a grammar cannot be followed")
            self.failed = _sentence(error)
            return None
        for token in self._model.eos_token_ids:
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return words

    def accept(self, token_id: int) -> None:
        """Advances by the token that was drawn."""
        if self.failed is None and not self.finished and not self._matcher.accept_token(token_id):
            self.failed = f"token {token_id} does not follow the grammar"
            logger.error("%s", self.failed)

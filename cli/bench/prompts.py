"""Prompts of an exact length: token ids of random common words."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headrace.cli.api import Address
from headrace.cli.bench.client import call, completion
from headrace.cli.errors import RUNTIME, CliError

# Short common words: nearly every vocabulary has each of them as one token after a space.
_TEXT = (
    "able about above air all also and any area back ball bank base bear bed best big bird black blue boat body "
    "book box boy bread bring brown build busy call car card care cat chair city class clean clear clock cloud "
    "coat cold come cook cool copy corn cost cup dance dark day deep desk dinner dog door draw dream dress drive "
    "dry each ear early earth east easy eat edge egg eight end even every eye face fact fair fall family far farm "
    "fast fear field fight fill fine fire fish five flat floor flower food foot forest form four free fresh friend "
    "fruit full game garden gate gift girl give glass gold good grass great green ground group grow half hall hand "
    "happy hard hat head hear heart heat heavy help high hill hold home hope horse hot hour house ice idea iron "
    "island job join jump keep key kind king lake land large last late laugh lead leaf learn left leg letter level "
    "life light line list little live long look love low machine make map mark market meal meat meet milk mind "
    "money month moon more morning mother mountain mouth move music name near neck need new news night nine north "
    "nose note number ocean office oil old open orange order out page paint paper park part party pass past path"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompt number i of a run: a list of token ids, or text for a server that cannot tokenize."""

    where: Address
    model: str
    tokens: int
    shared: int  # tokens that all prompts begin with
    seed: str
    words: int = 0  # 0: ask /tokenize; else so many words make about `tokens` tokens

    async def make(self, number: int) -> list[int] | str:
        text = self._text(number, self.words or self.tokens + 16)
        if self.words:
            return text
        reply = await call(self.where, "/tokenize", {"model": self.model, "prompt": text})
        ids = list((reply or {}).get("tokens", ()))
        if len(ids) < self.tokens:
            raise CliError(
                f"/tokenize gave {len(ids)} tokens where {self.tokens} were expected", RUNTIME
            )
        return ids[: self.tokens]

    def _text(self, number: int, words: int) -> str:
        common = random.Random(f"{self.seed} shared")
        own = random.Random(f"{self.seed} {number}")
        shared = min(self.shared, words)
        return " ".join(
            [common.choice(WORDS) for _ in range(shared)]
            + [own.choice(WORDS) for _ in range(words - shared)]
        )


async def prepare(where: Address, model: str, tokens: int, shared: int, seed: str) -> Prompts:
    """Prompts for a server: exact with /tokenize; else the number of words is fitted to the usage it reports."""
    probe = await call(where, "/tokenize", {"model": model, "prompt": "a b c"})
    if probe and probe.get(
        "tokens"
    ):  # others answer under this path too, with nothing for a field they do not know
        return Prompts(where, model, tokens, shared, seed)
    words = tokens
    for _ in range(4):
        prompts = Prompts(where, model, tokens, shared, seed, words)
        body = {
            "model": model,
            "prompt": await prompts.make(-1),
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sample = await completion(where, body, timeout=300.0)
        if sample.error:
            raise CliError(
                f"the request that measures the prompt length failed: {sample.error}", RUNTIME
            )
        if sample.prompt_tokens in (0, tokens):
            break
        words = max(1, words + tokens - sample.prompt_tokens)
    return Prompts(where, model, tokens, shared, seed, words)

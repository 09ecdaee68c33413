"""Model names: what /v1/models lists and what requests may say."""

from __future__ import annotations

import os
from collections.abc import Sequence

from headrace.engine.server.errors import ApiError


class ModelNames:
    """The names this server answers to.

    With --served-model-name: those, exactly. Otherwise the model's name: a hub id or "demo" as typed, a path's last
    component; the path as typed is understood too. A request that names no model gets the one that is served; a
    wrong or empty name is 404 model_not_found.
    """

    def __init__(self, model: str, served: Sequence[str] = ()) -> None:
        if served:
            self.listed = tuple(dict.fromkeys(served))
            self._known = frozenset(served)
        else:
            base = os.path.basename(model.rstrip("/")) or model
            local = os.path.isabs(model) or os.path.exists(model)
            self.listed = (base if local else model,)
            self._known = frozenset((model, base))

    @property
    def first(self) -> str:
        return self.listed[0]

    def check(self, name: str | None, param: str | None = "model") -> str:
        """The name to answer with. Raises ApiError 404."""
        if name is None:
            return self.first
        if name not in self._known:
            shown = name if len(name) <= 128 else name[:125] + "..."
            raise ApiError(
                404,
                f"The model '{shown}' is not served here; this server has {', '.join(self.listed)}.",
                param=param,
                code="model_not_found",
            )
        return name

"""DeepSeek-V2 and V3 and models of their form: latent attention, experts in groups, shared experts without a gate."""

from __future__ import annotations

import re

from headrace.engine.models.decoder import Decoder

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


class DeepseekV2(Decoder):
    """V2 chooses experts by softmax, V3 by sigmoid and a learnt bias (ModelSpec.routing).

    Layers behind the last one, which V3 has to guess a second token, are left aside.
    """

    def rename(self, name: str) -> str | None:
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= self.spec.layers:
            return None
        return name.replace(".shared_experts.", ".shared_expert.")

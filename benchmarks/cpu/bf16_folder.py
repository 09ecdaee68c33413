"""Writes a GGUF model as a bfloat16 safetensors folder, through transformers' own conversion.

`python benchmarks/cpu/bf16_folder.py MODEL.gguf FOLDER`, with a Python that has transformers and gguf (the peers'
environments have; benchmarks.cpu.install runs it there).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def main() -> None:
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    settings = load_gguf_checkpoint(str(file))["config"]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    missing, surplus = model.load_state_dict(loaded["tensors"], strict=False)
    if surplus or set(missing) - {"lm_head.weight"}:
        sys.exit(f"transformers maps this file otherwise: missing {missing}, unknown {surplus}")
    model.tie_weights()
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()

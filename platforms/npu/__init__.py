"""Ascend NPUs by torch_npu: probing without torch, CANN and driver versions, fused ops, ACL graphs, HCCL."""

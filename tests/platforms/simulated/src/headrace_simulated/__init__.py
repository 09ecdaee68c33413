"""An accelerator that is not there: tensors on a device of their own, streams, graphs. See the README."""

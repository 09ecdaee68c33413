"""What the devices have in common that PyTorch drives through a device module of its own (`torch.get_device_module`):
streams, events, memory, graphs, process groups. A platform says which module, which graph class and which library.
"""

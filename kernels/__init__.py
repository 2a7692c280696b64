"""The maths, tensors only: one implementation per kind of device and a PyTorch twin that is the truth."""

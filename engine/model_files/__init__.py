"""Model folders as they are on disk: where they are, whether they are whole, what they describe.

The router, the control plane and the checks before a start import this package. It must not import torch.
"""

"""Lets torchvision be imported beside a torch without CUDA, where the operators of PyPI's do not load.

timm and Classy Vision import torchvision and, as they are used here, call none of its operators. Where they load,
nothing is done.
"""

import importlib

import torch

try:
    importlib.import_module("torchvision")
except RuntimeError:
    # Those that torchvision describes to torch without asking whether they are there.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

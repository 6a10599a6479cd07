"""Models of other libraries, and plain modules as others write them.

torchvision's wheels hold kernels for one build of torch. On another one (CPU) they do not load, and then neither
torchvision nor what imports it (timm, transformers) can be imported, for want of the schemas of two operators that no
model here calls. They are entered here, before anything imports torchvision.
"""

import importlib
import importlib.util

import torch

KEPT: list[torch.library.Library] = []  # an operator lives as long as its library

if importlib.util.find_spec("torchvision") is not None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        KEPT.append(torch.library.Library("torchvision", "DEF"))
        for _name in ("nms", "qnms"):
            KEPT[0].define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")

"""timm (one of each family) and torchvision."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.outside.zoo_of_others import Classifier, Made, draw, entry, library, pictures
from tests.outside.zoo_of_others import classes as labels_of

HEADS8 = {"num_classes": 8}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, **HEADS8}


def _timm(path: str, size: int = 32, /, *args: Any, **sizes: Any) -> Made:
    module, _, name = path.rpartition(".")
    library("timm")
    made = getattr(library(f"timm.models.{module}"), name)(*args, **sizes)
    return Classifier(made), pictures(size)


def _by_name(model: str, size: int = 32, /, **sizes: Any) -> Made:
    return Classifier(library("timm").create_model(model, num_classes=8, **sizes)), pictures(size)


def _max_vit(block: str) -> Made:
    """``block``: the kinds of the four stages: M for MaxViT, C and T for CoAtNet."""
    module = library("timm.models.maxxvit")
    attention = module.MaxxVitTransformerCfg(dim_head=8, window_size=(2, 2))
    sizes = {"embed_dim": (16, 16, 32, 32), "depths": (1, 1, 1, 1), "stem_width": 16}
    config = module.MaxxVitCfg(block_type=tuple(block), transformer_cfg=attention, **sizes)
    return Classifier(module.MaxxVit(config, img_size=64, **HEADS8)), pictures(64)


def _of_config(module: str, model: str, config: str, /, **sizes: Any) -> Made:
    """Families of timm whose models are made of a config."""
    library("timm")
    found = library(f"timm.models.{module}")
    return Classifier(getattr(found, model)(getattr(found, config)(**sizes), **HEADS8)), pictures(32)


def _rep_vgg() -> Made:
    library("timm")
    block = library("timm.models.byobnet").ByoBlockCfg
    blocks = tuple(block(type="rep", d=1, c=c, s=2, gs=0) for c in (16, 16, 32, 32))
    return _of_config("byobnet", "ByobNet", "ByoModelCfg", blocks=blocks, stem_type="rep", stem_chs=16)


NF = {
    "depths": (1, 1, 1, 1),
    "channels": (16, 32, 32, 32),
    "stem_type": "3x3",
    "stem_chs": 16,
    "bottle_ratio": 0.5,
    "act_layer": "silu",
    "num_features": 32,
}
TIMM: dict[str, Any] = {
    "resnet": lambda: _timm(
        "resnet.ResNet", 32, _block("resnet.Bottleneck"), [1, 1, 1, 1], channels=(8, 16, 16, 16), **HEADS8
    ),
    "regnet": lambda: _of_config(
        "regnet", "RegNet", "RegNetCfg", w0=16, wa=12.0, wm=2.0, group_size=8, depth=8, se_ratio=0.25
    ),
    "efficientnet": lambda: _timm(
        "efficientnet._gen_efficientnet", 32, "efficientnet_b0", channel_multiplier=0.25, depth_multiplier=0.3, **HEADS8
    ),
    "mobilenetv3": lambda: _by_name("mobilenetv3_small_050", 32),
    "densenet": lambda: _timm("densenet.DenseNet", 32, growth_rate=8, block_config=(2, 2), **HEADS8),
    "convnext": lambda: _timm("convnext.ConvNeXt", 32, depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), **HEADS8),
    "convnextv2": lambda: _timm(
        "convnext.ConvNeXt", 32, depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), use_grn=True, ls_init_value=None, **HEADS8
    ),
    "vit": lambda: _timm("vision_transformer.VisionTransformer", num_heads=4, **VIT),
    "deit distilled": lambda: _timm("deit.VisionTransformerDistilled", num_heads=4, **VIT),
    "beit": lambda: _timm(
        "beit.Beit", num_heads=4, use_rel_pos_bias=True, use_abs_pos_emb=False, init_values=0.1, **VIT
    ),
    "eva": lambda: _timm("eva.Eva", num_heads=4, use_rot_pos_emb=True, swiglu_mlp=True, **VIT),
    "cait": lambda: _timm("cait.Cait", num_heads=4, **VIT),
    "xcit": lambda: _timm("xcit.Xcit", num_heads=4, cls_attn_layers=1, **VIT),
    "swin": lambda: _timm(
        "swin_transformer.SwinTransformer",
        32,
        img_size=32,
        patch_size=4,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.0,
        **HEADS8,
    ),
    "swin odd heads": lambda: _timm(
        "swin_transformer.SwinTransformer",
        32,
        img_size=32,
        patch_size=4,
        window_size=4,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(3, 6),
        drop_path_rate=0.0,
        **HEADS8,
    ),
    "swinv2": lambda: _timm(
        "swin_transformer_v2.SwinTransformerV2",
        32,
        img_size=32,
        patch_size=4,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.0,
        **HEADS8,
    ),
    "mlp mixer": lambda: _timm(
        "mlp_mixer.MlpMixer", 32, img_size=32, patch_size=8, num_blocks=2, embed_dim=32, **HEADS8
    ),
    "gmlp": lambda: _timm(
        "mlp_mixer.MlpMixer",
        32,
        img_size=32,
        patch_size=8,
        num_blocks=2,
        embed_dim=32,
        mlp_ratio=4,
        block_layer=_block("mlp_mixer.SpatialGatingBlock"),
        mlp_layer=library("timm.layers").GatedMlp,
        **HEADS8,
    ),
    "poolformer": lambda: _timm("metaformer.MetaFormer", 32, depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), **HEADS8),
    "coatnet": lambda: _max_vit("CCTT"),
    "maxvit": lambda: _max_vit("MMMM"),
    "mobilevit": lambda: _by_name("mobilevit_xxs", 64),
    "levit": lambda: _timm(
        "levit.Levit", 64, img_size=64, embed_dim=(16, 32), key_dim=8, depth=(1, 1), num_heads=(2, 4), **HEADS8
    ),
    "pvt_v2": lambda: _timm(
        "pvt_v2.PyramidVisionTransformerV2",
        64,
        depths=(1, 1, 1, 1),
        embed_dims=(8, 16, 16, 32),
        num_heads=(1, 2, 2, 4),
        sr_ratios=(8, 4, 2, 1),
        **HEADS8,
    ),
    "twins": lambda: _timm(
        "twins.Twins",
        64,
        img_size=64,
        patch_size=4,
        embed_dims=(16, 32),
        num_heads=(2, 4),
        mlp_ratios=(2, 2),
        depths=(1, 1),
        sr_ratios=(4, 2),
        wss=(4, 4),
        **HEADS8,
    ),
    "crossvit": lambda: _timm(
        "crossvit.CrossVit",
        32,
        img_size=32,
        img_scale=(1.0, 0.5),
        patch_size=(4, 8),
        embed_dim=(16, 32),
        depth=((1, 1, 0),),
        num_heads=(2, 2),
        mlp_ratio=(2.0, 2.0, 1.0),
        **HEADS8,
    ),
    "nfnet": lambda: _of_config("nfnet", "NormFreeNet", "NfCfg", **NF),
    "repvgg": _rep_vgg,
    "ghostnet": lambda: _by_name("ghostnet_050", 32),
    "hiera": lambda: _timm(
        "hiera.Hiera", 64, img_size=(64, 64), embed_dim=16, num_heads=1, stages=(1, 1, 1, 1), **HEADS8
    ),
    "edgenext": lambda: _timm(
        "edgenext.EdgeNeXt", 64, depths=(1, 1, 1, 1), dims=(8, 16, 32, 32), global_block_counts=(0, 1, 1, 1), **HEADS8
    ),
    "davit": lambda: _timm(
        "davit.DaVit",
        64,
        depths=(1, 1, 1, 1),
        embed_dims=(8, 16, 16, 32),
        num_heads=(2, 2, 2, 4),
        window_size=2,
        **HEADS8,
    ),
    "drop path": lambda: _timm("vision_transformer.VisionTransformer", num_heads=4, drop_path_rate=0.5, **VIT),
}
for _name, _build in TIMM.items():
    entry("timm", _name, "timm")(_build)


def _block(path: str) -> Any:
    module, _, name = path.rpartition(".")
    library("timm")
    return getattr(library(f"timm.models.{module}"), name)


def _vision(name: str, size: int = 32, /, **sizes: Any) -> Made:
    return Classifier(getattr(library("torchvision").models, name)(num_classes=8, **sizes)), pictures(size)


def _video() -> Made:
    video = library("torchvision.models.video")
    resnet = video.resnet
    made = resnet.VideoResNet(
        resnet.BasicBlock, [resnet.Conv3DSimple] * 4, [1, 1, 1, 1], resnet.BasicStem, num_classes=8
    )
    return Classifier(made), {"x": draw(4, 3, 4, 16, 16), "labels": labels_of(4)}


class Segmentation(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(self.body(x)["out"], labels)


def _deeplab() -> Made:
    seg = library("torchvision.models.segmentation")
    made = seg.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    return Segmentation(made), {"x": draw(4, 3, 32, 32), "labels": labels_of(4, 32, 32, count=4)}


def _vit() -> Made:
    vt = library("torchvision.models.vision_transformer")
    return Classifier(vt.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=8)), pictures(32)


def _swin() -> Made:
    sw = library("torchvision.models.swin_transformer")
    made = sw.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=8)
    return Classifier(made), pictures(32)


def _convnext() -> Made:
    cn = library("torchvision.models.convnext")
    setting = [cn.CNBlockConfig(16, 32, 1), cn.CNBlockConfig(32, None, 1)]
    return Classifier(cn.ConvNeXt(setting, num_classes=8)), pictures(32)


VISION: dict[str, Any] = {
    "resnet18": lambda: _vision("resnet18", 32, width_per_group=64),
    "mobilenet_v2": lambda: _vision(
        "mobilenet_v2",
        32,
        width_mult=0.25,
        inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2]],
        dropout=0.0,
    ),
    "shufflenet": lambda: _vision("shufflenet_v2_x0_5", 64),
    "r3d": _video,
    "lraspp": _deeplab,
    "vit": _vit,
    "swin": _swin,
    "convnext": _convnext,
}
for _name, _build in VISION.items():
    entry("torchvision", _name, "torchvision")(_build)

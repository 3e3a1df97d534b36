"""Models that people know, each under every scheme; the arguments of transformers carry Hugging
Face's names, the parts of ResNets torchvision's."""

from parlinalg.nn.layer import Layer
from parlinalg.nn.models.bert import BertEncoder
from parlinalg.nn.models.gpt import GPT
from parlinalg.nn.models.llama import Llama, Mixtral, Qwen2Moe
from parlinalg.nn.models.resnet import ResNet, resnet18, resnet34, resnet50
from parlinalg.nn.models.transformer import Transformer
from parlinalg.nn.models.vit import ViT

__all__ = [
    "GPT", "BertEncoder", "Layer", "Llama", "Mixtral", "Qwen2Moe", "ResNet", "Transformer", "ViT", "resnet18",
    "resnet34", "resnet50",
]  # fmt: skip

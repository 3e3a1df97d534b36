"""Models that people know, each under every scheme; their arguments carry Hugging Face's names."""

from parlinalg.nn.layer import Layer
from parlinalg.nn.models.bert import BertEncoder
from parlinalg.nn.models.gpt import GPT
from parlinalg.nn.models.llama import Llama
from parlinalg.nn.models.transformer import Transformer
from parlinalg.nn.models.vit import ViT

__all__ = ["GPT", "BertEncoder", "Layer", "Llama", "Transformer", "ViT"]

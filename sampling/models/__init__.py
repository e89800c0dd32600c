"""The model: its configuration, its forward and its key/value cache."""

from sampling.models.config import ModelConfig, RopeScaling
from sampling.models.kv_cache import KVCache
from sampling.models.mesh import ModelMesh
from sampling.models.transformer import Transformer

__all__ = ["KVCache", "ModelConfig", "ModelMesh", "RopeScaling", "Transformer"]

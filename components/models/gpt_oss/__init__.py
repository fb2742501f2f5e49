"""gpt-oss: attention with learned sinks and windows, and a mixture of experts in every layer."""

from components.models.gpt_oss.build import build, random_gpt_oss
from components.models.gpt_oss.builders import (
    gpt_oss,
    gpt_oss_20b,
    gpt_oss_120b,
    lora_gpt_oss,
    lora_gpt_oss_20b,
    lora_gpt_oss_120b,
)
from components.models.gpt_oss.config import GPT_OSS_20B, GPT_OSS_120B, GptOssConfig

__all__ = [
    "GPT_OSS_20B",
    "GPT_OSS_120B",
    "GptOssConfig",
    "build",
    "gpt_oss",
    "gpt_oss_20b",
    "gpt_oss_120b",
    "lora_gpt_oss",
    "lora_gpt_oss_20b",
    "lora_gpt_oss_120b",
    "random_gpt_oss",
]

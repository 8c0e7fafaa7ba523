"""The architectures that have a forward pass of our own, by their name in config.json. No torch here."""

from engine.model_files.families import deepseek, dense, experts, gemma
from engine.model_files.families.common import Family

FAMILIES: dict[str, Family] = {
    architecture: family
    for families in (dense.FAMILIES, gemma.FAMILIES, experts.FAMILIES, deepseek.FAMILIES)
    for family in families
    for architecture in family.architectures
}

"""Tiny checkpoints made from a seed, and the check that a folder is a checkpoint at all."""

from mrv2_diff.models.checkpoint import cached_model, make_model
from mrv2_diff.models.folder import ModelFolderError, check_model_folder
from mrv2_diff.models.spec import ModelSpec

__all__ = ["ModelFolderError", "ModelSpec", "cached_model", "check_model_folder", "make_model"]

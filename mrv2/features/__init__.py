"""Features that take part in a step as extensions, one file each."""

from mrv2.extension import ExtensionFactory
from mrv2.features.prompt_logprobs import PromptLogprobs

EXTENSIONS: tuple[ExtensionFactory, ...] = (PromptLogprobs,)
"""Those that every runner has, unless its host says otherwise."""

"""Every model of others."""

from tests.outside import diffusion as diffusion
from tests.outside import experts_of_others as experts_of_others
from tests.outside import multimodal as multimodal
from tests.outside import newer_families as newer_families
from tests.outside import others as others
from tests.outside import plain_ideas as plain_ideas
from tests.outside import plain_nets as plain_nets
from tests.outside import plain_sequences as plain_sequences
from tests.outside import speech_and_more as speech_and_more
from tests.outside import vision as vision
from tests.outside import vision_language as vision_language
from tests.outside.zoo_of_others import MODELS as MODELS

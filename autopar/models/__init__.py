"""Models of libraries: how they are captured, and small ones.

hf, hf_masks, hf_batches, hf_configs, hf_checkpoints      transformers: attention and experts as single operators,
                                                          masks as facts, files under their names
hf_images                                 images of any sizes as inputs of a step
hf_versions                               how its versions differ
tiny                                      small configs of many architectures, for tests and the demo

Stands on capture and ir. Tests and the command line import it; `autopar.api` loads the adapter of a model's library by
name, so that it works without that library.
"""

from autopar.adapters.versions import refuse_older

refuse_older("transformers")

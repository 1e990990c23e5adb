// Prompts whose keys are just those of the batch.
#include "prompts.cuh"

PROMPT_KERNEL(prompts::Ragged);

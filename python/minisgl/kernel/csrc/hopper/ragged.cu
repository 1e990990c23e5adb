// The kernel for prompts whose keys are all in the batch.
#include "prompts.cuh"

PROMPT_KERNEL(prompts::Ragged);

// Prompts whose keys are partly or wholly in the pages of the pool.
#include "prompts.cuh"

PROMPT_KERNEL(prompts::Paged);

// The kernel for prompts some or all of whose keys are in the pages of the pool.
#include "prompts.cuh"

PROMPT_KERNEL(prompts::Paged);

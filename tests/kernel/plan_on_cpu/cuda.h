// Stands in for CUDA's header of this name: what csrc/hopper/sizes.h names of it.
#pragma once

struct CUtensorMap {};

// Stands in for FlashInfer's header of this name: what csrc/hopper/sizes.h names of it.
#pragma once

namespace flashinfer {

struct uint_fastdiv {};

}  // namespace flashinfer

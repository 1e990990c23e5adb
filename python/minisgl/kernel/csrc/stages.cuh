// A ring of stages in shared memory: each is filled by copies, read by products, and filled again.

#pragma once

#include <cstdint>

// The stages in turn. Each time round the phase of their barriers changes.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void go_on() {
    if (++stage < kStages) return;
    stage = 0;
    phase ^= 1;
  }
};

// A loop over work that threads divide dynamically, while it runs.

#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

// Each thread has a share of the iterations, which it takes in order. When its share is done, it
// takes from the ends of the others' shares ("work stealing", Blumofe and Leiserson 1999). So if
// another program holds up a thread, the others do most of its share.
class DividedLoop {
 public:
  // kept: iterations at the end of a share that others leave to its thread, which is done with them
  // before another one has fetched their data.
  explicit DividedLoop(int64_t length, uint64_t kept = 2)
      : kept_(kept), shares_(omp_get_max_threads()) {
    int64_t num_shares = shares_.size();
    for (int64_t i = 0; i < num_shares; ++i)
      shares_[i].rest = pack(length * i / num_shares, length * (i + 1) / num_shares);
  }

  // Take an iteration for the calling thread; -1 if none is left for it. A thread calls until then.
  int64_t next() {
    int own = omp_get_thread_num(), num_shares = static_cast<int>(shares_.size());
    shares_[own].has_thread.store(true, kRelaxed);
    int64_t i = take_first(shares_[own]);
    for (int other = 1; i < 0 && other < num_shares; ++other)
      i = take_last(shares_[(own + other) % num_shares]);
    return i;
  }

 private:
  // A share has a cache line of its own. `rest` has the next iteration in its upper half, and the
  // end in its lower. As there may be fewer threads than shares, a share without one is taken
  // wholly.
  struct alignas(64) Share {
    std::atomic<uint64_t> rest;
    std::atomic<bool> has_thread = false;
  };

  static uint64_t pack(uint64_t next, uint64_t end) { return next << 32 | end; }

  static int64_t take_first(Share& share) {
    uint64_t rest = share.rest.load(kRelaxed), next, end;
    do {
      next = rest >> 32, end = rest & 0xffffffff;
      if (next == end) return -1;
    } while (!share.rest.compare_exchange_weak(rest, pack(next + 1, end), kRelaxed));
    return static_cast<int64_t>(next);
  }

  int64_t take_last(Share& share) const {
    uint64_t kept = share.has_thread.load(kRelaxed) ? kept_ : 0;
    uint64_t rest = share.rest.load(kRelaxed), next, end;
    do {
      next = rest >> 32, end = rest & 0xffffffff;
      if (next + kept >= end) return -1;
    } while (!share.rest.compare_exchange_weak(rest, pack(next, end - 1), kRelaxed));
    return static_cast<int64_t>(end - 1);
  }

  uint64_t kept_;
  std::vector<Share> shares_;
};

}  // namespace

// Stands in for csrc/hopper.cuh: the same functions, as the PTX ISA describes the instructions.
//
// What goes on in the background is done as late as it may be: copies of boxes when a thread finds
// that it has to wait for their barrier, products and stores of boxes when their thread waits for them.
// With an odd seed a store is done at once.

#pragma once

#include <ptx.cuh>
#include <tvm/ffi/container/tensor.h>

constexpr int kWarpgroup = 128;

namespace cuda_on_cpu {

struct Barrier {
  int8_t num_arrivals, missing, phase, unused;
  int32_t missing_bytes;

  void end_phase_if_complete() {
    if (missing || missing_bytes) return;
    missing = num_arrivals;
    phase ^= 1;
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));

inline Barrier& barrier_at(uint64_t* place) { return reinterpret_cast<Barrier&>(*place); }

// By so many looks at its barrier a copy is late. A few come after a block that waits for none of them
// could have ended.
inline unsigned lateness() {
  if (!seed || random() % 4 != 0) return 0;
  return random() % (random() % 8 == 0 ? 200'000 : 20'000);
}

struct BoxCopy {
  uint64_t* barrier;
  std::function<void()> copy;
  unsigned late = lateness();
};

// Those of all blocks that have begun and not ended.
inline std::deque<BoxCopy> box_copies;

inline void make_one_copy_of(uint64_t* barrier) {
  auto is_of_barrier = [=](const BoxCopy& it) { return it.barrier == barrier; };
  auto it = std::find_if(box_copies.begin(), box_copies.end(), is_of_barrier);
  if (it == box_copies.end()) return;
  if (it->late > 0) {
    --it->late;
    return;
  }
  it->copy();
  box_copies.erase(it);
}

// Where a byte of a swizzled box lies: bits 7 to 9 of its address are added to bits 4 to 6.
inline char* swizzled(uint64_t address) {
  return reinterpret_cast<char*>(address ^ (address >> 7 & 7) << 4);
}

template <class IsThere>
void wait_until(IsThere is_there, const char* what) {
  for (int turns = 0; !is_there(); let_others_run())
    if (++turns == 1'000'000) {
      failure = what;
      meet(Point::end);
    }
}

}  // namespace cuda_on_cpu

struct CUtensorMap {
  char* data;
  int64_t num_columns, num_rows, row_bytes;
  int box_rows;

  // Calls `visit` with each place of a box in shared memory, and that in the matrix or null.
  template <class Visit>
  void visit_box(int column, int row, const void* box, Visit visit) const {
    auto begin = reinterpret_cast<uint64_t>(box);
    if (begin % 1024) cuda_on_cpu::failure = "a box has to begin at a multiple of 1,024 bytes";
    for (int i = 0; i < box_rows; ++i)
      for (int j = 0; j < 64; ++j) {
        int64_t r = row + i, c = column + j;
        bool is_there = r < num_rows && c < num_columns;
        visit(reinterpret_cast<uint16_t*>(cuda_on_cpu::swizzled(begin + 128 * i + 2 * j)),
              is_there ? reinterpret_cast<uint16_t*>(data + r * row_bytes + 2 * c) : nullptr);
      }
  }
};

inline CUtensorMap map_of_boxes(tvm::ffi::TensorView x, int num_rows) {
  return {static_cast<char*>(x.data_ptr()), x.size(1), x.size(0), 2 * x.stride(0), num_rows};
}

inline void init_barrier(uint64_t* barrier, int num_arrivals) {
  auto num = static_cast<int8_t>(num_arrivals);
  cuda_on_cpu::barrier_at(barrier) = {num, num, 0, 0, 0};
}

inline void publish_barriers() {}

inline void arrive(uint64_t* barrier) {
  cuda_on_cpu::Barrier& it = cuda_on_cpu::barrier_at(barrier);
  --it.missing;
  it.end_phase_if_complete();
}

inline void arrive_in_cluster(uint64_t* barrier, int block) {
  arrive(cuda_on_cpu::place_in_cluster(barrier, block));
}

inline void arrive_and_expect(uint64_t* barrier, int num_bytes) {
  cuda_on_cpu::barrier_at(barrier).missing_bytes += num_bytes;
  arrive(barrier);
}

inline void wait_for_phase(uint64_t* barrier, uint32_t phase) {
  auto has_ended = [&] {
    if (cuda_on_cpu::barrier_at(barrier).phase != int(phase)) return true;
    cuda_on_cpu::make_one_copy_of(barrier);
    return false;
  };
  cuda_on_cpu::wait_until(has_ended, "a phase of a barrier does not end");
}

// Of what no kernel writes.
inline void begin_streamed_copy(void* place, const CUtensorMap& matrix, int column, int row,
                                uint64_t* barrier) {
  auto copy = [=] {
    cuda_on_cpu::check_that_block_runs(barrier);
    cuda_on_cpu::let_arrive(&cuda_on_cpu::LateInput::value);  // whichever thread it is that waits
    matrix.visit_box(column, row, place, [](uint16_t* to, uint16_t* from) { *to = from ? *from : 0; });
    cuda_on_cpu::Barrier& it = cuda_on_cpu::barrier_at(barrier);
    it.missing_bytes -= matrix.box_rows * 128;
    it.end_phase_if_complete();
  };
  cuda_on_cpu::box_copies.push_back({barrier, copy});
}

inline void begin_box_copy(void* place, const CUtensorMap& matrix, int column, int row,
                           uint64_t* barrier) {
  if (!cuda_on_cpu::current->has_inputs) cuda_on_cpu::failure = "a copy before the inputs are there";
  begin_streamed_copy(place, matrix, column, row, barrier);
}

// The block that copies has to run until all of the cluster have the copy.
template <int kCluster>
void begin_copy_to_cluster(void* place, const CUtensorMap& matrix, int column, int row,
                           uint64_t* barrier) {
  for (int block = 0; block < kCluster; ++block) {
    uint64_t* of_block = cuda_on_cpu::place_in_cluster(barrier, block);
    begin_box_copy(cuda_on_cpu::place_in_cluster(place, block), matrix, column, row, of_block);
    auto check = [=] { cuda_on_cpu::check_that_block_runs(barrier); };
    auto copy = std::move(cuda_on_cpu::box_copies.back().copy);
    cuda_on_cpu::box_copies.back().copy = [=] { check(), copy(); };
  }
}

inline void begin_box_store(const CUtensorMap& matrix, int column, int row, const void* place) {
  auto store = [=] {
    matrix.visit_box(column, row, place, [](uint16_t* from, uint16_t* to) {
      if (to) *to = *from;
    });
  };
  if (cuda_on_cpu::seed % 2) store();
  else cuda_on_cpu::current->copies.begin(store);
}

inline void publish_to_stores() {}

inline void group_stores() { cuda_on_cpu::current->copies.close_group(); }

inline void wait_for_stores() { cuda_on_cpu::current->copies.wait(0); }

inline void wait_until_stores_have_read() { wait_for_stores(); }

template <int>
void shrink_to() {}

template <int>
void grow_to() {}

inline void sync_warpgroup(int number) {
  cuda_on_cpu::Thread* block = cuda_on_cpu::current - threadIdx.x;
  cuda_on_cpu::Point* points = cuda_on_cpu::points_of_block();
  cuda_on_cpu::current->barrier = number;
  for (unsigned i = 0; i < cuda_on_cpu::current_grid->block_size; ++i) {
    bool waits = points[i] == cuda_on_cpu::Point::warpgroup && block[i].barrier == number;
    if (waits && i / kWarpgroup != threadIdx.x / kWarpgroup)
      cuda_on_cpu::failure = "two warpgroups wait at the same barrier";
  }
  cuda_on_cpu::meet(cuda_on_cpu::Point::warpgroup);
}

inline uint64_t describe_matrix(const void* place) { return reinterpret_cast<uint64_t>(place); }

constexpr uint64_t kNext16Inputs = 32;

inline void begin_products() {}

inline void group_products() { cuda_on_cpu::current->products.close_group(); }

template <int kPending>
void wait_for_products() {
  cuda_on_cpu::current->products.wait(kPending);
  cuda_on_cpu::meet(cuda_on_cpu::Point::warp);
}

template <int kColumns>
void multiply_64(float (&sums)[kColumns / 2], uint64_t a, uint64_t b, bool add) {
  auto number = [](uint64_t matrix, unsigned row, unsigned input) {
    auto place = cuda_on_cpu::swizzled(matrix + 128 * row + 2 * input);
    return of_bfloat16(*reinterpret_cast<uint16_t*>(place));
  };
  unsigned lane = cuda_on_cpu::lane(), warp = threadIdx.x % kWarpgroup / 32;
  cuda_on_cpu::current->products.begin([=, &sums] {
    for (unsigned i = 0; i < kColumns / 2; ++i) {
      unsigned row = 16 * warp + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = add ? sums[i] : 0;
      for (unsigned k = 0; k < 16; ++k) sum += number(a, row, k) * number(b, column, k);
      sums[i] = sum;
    }
  });
}

template <int kNum>
void read_now(float (&)[kNum]) {}

inline void store_matrices(void* place, const uint32_t (&words)[4]) {
  unsigned lane = cuda_on_cpu::lane();
  auto read = [&](auto of_lane) {
    for (unsigned i = 0; i < 4; ++i)
      static_cast<uint32_t*>(of_lane(8 * i + lane / 4))[lane % 4] = words[i];
    return true;
  };
  cuda_on_cpu::with_warp(cuda_on_cpu::Point::product, place, read);
}

inline bool is_hopper(int) { return true; }

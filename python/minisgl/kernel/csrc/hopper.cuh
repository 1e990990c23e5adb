// Instructions that Hopper alone has: barriers in shared memory, copies of boxes of a matrix between
// global and shared memory in the background (TMA), and products by the four warps of a warpgroup
// together (PTX ISA, mbarrier, cp.async.bulk.tensor and wgmma). They are compiled for sm_90a only.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <cstdint>

#include <ptx.cuh>

constexpr int kWarpgroup = 128;  // threads

__device__ inline uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

// A phase of a barrier ends when so many have arrived, and the bytes that they expect, too.
__device__ inline void init_barrier(uint64_t* barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(num_arrivals));
}

// Copies in the background see barriers that were made before.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// At the same place of shared memory in a block of the cluster, which may be this one.
__device__ inline void arrive_in_cluster(uint64_t* barrier, int block) {
  asm volatile(
      "{ .reg .b32 place; mapa.shared::cluster.u32 place, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [place]; }" ::"r"(
          shared_address(barrier)),
      "r"(block)
      : "memory");
}

__device__ inline void arrive_and_expect(uint64_t* barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(num_bytes)
               : "memory");
}

// Phases count 0, 1, 0, 1 and so on. The one before the first has ended.
__device__ inline void wait_for_phase(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{ .reg .pred has_ended;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 has_ended, [%0], %1;\n"
      "@!has_ended bra again; }" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// Copies the box that begins at a column and a row. Numbers outside the matrix are zero.
__device__ inline void begin_box_copy(void* place, const CUtensorMap& matrix, int column, int row,
                                      uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(place)),
      "l"(&matrix), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// The same for a box that is read once: it leaves the L2 cache before all else. The policy is what
// `createpolicy.fractional.L2::evict_first` makes.
__device__ inline void begin_streamed_copy(void* place, const CUtensorMap& matrix, int column,
                                           int row, uint64_t* barrier) {
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(place)),
      "l"(&matrix), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// The same for a box that all blocks of the cluster read: it is copied to the same place of each, and
// each has its barrier there.
template <int kCluster>
__device__ void begin_copy_to_cluster(void* place, const CUtensorMap& matrix, int column, int row,
                                      uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(place)),
      "l"(&matrix), "r"(column), "r"(row), "r"(shared_address(barrier)),
      "h"(static_cast<uint16_t>((1 << kCluster) - 1))
      : "memory");
}

// Stores a box, without the part outside the matrix.
__device__ inline void begin_box_store(const CUtensorMap& matrix, int column, int row,
                                       const void* place) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   &matrix),
               "r"(column), "r"(row), "r"(shared_address(place))
               : "memory");
}

// Makes the threads' writes to shared memory visible to stores of boxes that begin later.
__device__ inline void publish_to_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void group_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the shared memory of this thread's stores has been read.
__device__ inline void wait_until_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// A multiple of 8. All warps of a warpgroup give registers away, or take them.
template <int kRegisters>
__device__ void shrink_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ void grow_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits for the threads of this warpgroup, which has a number from 1 to 15 of its own.
__device__ inline void sync_warpgroup(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kWarpgroup) : "memory");
}

// Describes a matrix in shared memory to `multiply_64`: rows of 128 bytes, swizzled as those of a
// box, from a multiple of 1,024 bytes on.
__device__ inline uint64_t describe_matrix(const void* place) {
  constexpr uint64_t kBytesOfEightRows = 1024, kSwizzle128 = 1;
  uint64_t begin = (shared_address(place) & 0x3ffff) >> 4;
  return begin | uint64_t{1} << 16 | kBytesOfEightRows >> 4 << 32 | kSwizzle128 << 62;
}

constexpr uint64_t kNext16Inputs = 32 >> 4;  // to add to a description

// Products that begin later see what threads have written to their sums.
__device__ inline void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void group_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all groups of products have ended but the last kPending.
template <int kPending>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// sums (+)= a b' for 64 rows of a and kColumns of b, with 16 inputs each. Of the 8 columns from 8 j on,
// a thread has two neighbours of row `lane / 4` of its warp's 16 rows in sums[4 j] and sums[4 j + 1],
// and the same of eight rows below in the next two.
template <int kColumns>
__device__ void multiply_64(float (&sums)[kColumns / 2], uint64_t a, uint64_t b, bool add);

#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define NAMES_20 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
#define NAMES_32 NAMES_20 ", %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_56 \
  NAMES_40 \
  ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_68 NAMES_64 ", %64, %65, %66, %67"
#define NAMES_72 NAMES_68 ", %68, %69, %70, %71"
#define NAMES_112 \
  NAMES_72 \
  ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, " \
  "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, " \
  "%107, %108, %109, %110, %111"
#define NAMES_128 \
  NAMES_112 \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
// NAMES and SUMS are those of all sums. A, B and ADD name the operands that follow them.
#define MULTIPLY_64(COLUMNS, NAMES, A, B, ADD, ...) \
  template <> \
  __device__ inline void multiply_64<COLUMNS>(float (&sums)[COLUMNS / 2], uint64_t a, uint64_t b, \
                                              bool add) { \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, " ADD ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" NAMES "}, " A \
                 ", " B ", add, 1, 1, 0, 0; }" \
                 : __VA_ARGS__ \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add))); \
  }
MULTIPLY_64(40, NAMES_20, "%20", "%21", "%22", SUMS_8(0), SUMS_8(8), SUMS_4(16))
MULTIPLY_64(64, NAMES_32, "%32", "%33", "%34", SUMS_32(0))
MULTIPLY_64(80, NAMES_40, "%40", "%41", "%42", SUMS_32(0), SUMS_8(32))
MULTIPLY_64(112, NAMES_56, "%56", "%57", "%58", SUMS_32(0), SUMS_8(32), SUMS_8(40), SUMS_8(48))
MULTIPLY_64(128, NAMES_64, "%64", "%65", "%66", SUMS_32(0), SUMS_32(32))
MULTIPLY_64(136, NAMES_68, "%68", "%69", "%70", SUMS_32(0), SUMS_32(32), SUMS_4(64))
MULTIPLY_64(144, NAMES_72, "%72", "%73", "%74", SUMS_32(0), SUMS_32(32), SUMS_8(64))
MULTIPLY_64(224, NAMES_112, "%112", "%113", "%114", SUMS_32(0), SUMS_32(32), SUMS_32(64),
            SUMS_8(96), SUMS_8(104))
MULTIPLY_64(256, NAMES_128, "%128", "%129", "%130", SUMS_32(0), SUMS_32(32), SUMS_32(64),
            SUMS_32(96))
#undef MULTIPLY_64
#undef NAMES_128
#undef NAMES_112
#undef NAMES_72
#undef NAMES_68
#undef NAMES_64
#undef NAMES_56
#undef NAMES_40
#undef NAMES_32
#undef NAMES_20
#undef SUMS_32
#undef SUMS_8
#undef SUMS_4

// A compiler reads these sums here and not before.
template <int kNum>
__device__ void read_now(float (&sums)[kNum]) {
#pragma unroll
  for (int i = 0; i < kNum; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Stores four matrices of 8 x 8 words of 16 bits, of which a thread has two neighbours each as
// `multiply_64` leaves them. Of each eight threads, each has the place of a row of one matrix.
__device__ inline void store_matrices(void* place, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(place)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

inline bool is_hopper(int device) {
  return attribute_of(device, cudaDevAttrComputeCapabilityMajor) == 9;
}

// A function of the driver, to whose library nothing is linked.
inline auto find_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  auto result = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                 cudaEnableDefault, &found);
  TVM_FFI_ICHECK(result == cudaSuccess && found == cudaDriverEntryPointSuccess)
      << "the driver has no cuTensorMapEncodeTiled";
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// Describes a matrix of bfloat16s to copies of boxes, which have 64 columns and so many rows. Rows
// begin at multiples of 16 bytes. In shared memory a row of a box has 128 bytes, whose pieces of 16
// bytes are swizzled: piece i of row r is at i ^ r % 8. A box begins at a multiple of 1,024 bytes.
inline CUtensorMap map_of_boxes(tvm::ffi::TensorView matrix, int num_rows) {
  static const auto encode = find_map_encoder();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.size(1)),
                              static_cast<cuuint64_t>(matrix.size(0))};
  const cuuint64_t strides[] = {2 * static_cast<cuuint64_t>(matrix.stride(0))};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(num_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix.data_ptr(), sizes,
                           strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(result == CUDA_SUCCESS) << "a matrix does not lie as copies of boxes need it";
  return map;
}

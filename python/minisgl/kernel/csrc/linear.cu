// The product of a few tokens with a weight, which is bound by reading the weight. For small
// weights see small_linear.cu.
//
// At most 16 tokens. A block takes one group of the weight's rows after the other, and its 8 warps
// divide the inputs among themselves. A thread keeps its numbers of the tokens in registers. Its
// numbers of the weight are copied to shared memory in the background: those of the first group
// before the kernel waits for the tokens, so that memory is busy while the kernel before this one
// ends, and those of the next group as soon as a place is free. A thread reads only what it has
// copied, so no copy waits for another thread. The numbers go to the tensor cores as they lie: any
// order of the inputs gives the same product, so a thread takes 16 bytes of a row as its words of
// fragments. Where there are many inputs, each block of a cluster has a part of them. The sums of
// warps and those of parts are added up in a fixed order.
// The contract is in gpu_products.py.
//
// Dimensions: I inputs of a linear layer, O outputs of a linear layer, T tokens of a step.

#include <cstdint>

#include "launch.cuh"
#include "linear.cuh"

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kPiece = 32;               // inputs that a warp multiplies at a time: 8 a thread
constexpr int kRound = kWarps * kPiece;  // inputs that a block multiplies at a time
constexpr int kMostRounds = 10;          // rounds of a block: 160 KiB of the weight are in flight
constexpr int kMostParts = 4;            // parts of the inputs, one for each block of a cluster
constexpr int kTile = 8;                 // rows of the weight in a fragment
constexpr int kTiles = 4;                // tiles of a group
constexpr int kRows = kTile * kTiles;
constexpr int kHalf = 8;                 // half of a fragment's tokens
constexpr int kFragment = 2 * kHalf;
constexpr int kJoined = 4;               // groups whose parts are added up together

// Each block of a cluster has a part of the inputs.
struct Parts {
  int num, inputs;
};

// The shared memory of a block: what is being copied of the weight for each thread, the sums of its
// warps, and the sums of the parts. Rows of `of_warp` are padded, to avoid bank conflicts.
template <int kTokens, int kRounds>
struct Shared {
  uint4 weight[kRounds][kTiles][kThreads];
  alignas(16) float of_warp[kWarps][kTokens][kRows + 8];
  alignas(16) float of_part[kJoined][kTokens][kRows];
};

// Adds up `num` vectors of four floats. Vector i is at `place_of(i)`.
template <class PlaceOf>
__device__ float4 sum_of(int num, PlaceOf place_of) {
  float4 sum{};
  for (int i = 0; i < num; ++i) {
    float4 x = *reinterpret_cast<const float4*>(place_of(i));
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
  }
  return sum;
}

// Writes four outputs of a token, whose sums `sum_at` returns. `output` counts from the group's
// first output.
template <class SumAt>
__device__ void write(const Product& in, int group, int token, int output, SumAt sum_at) {
  float4 sum = sum_at(token, output);
  float y[4] = {sum.x, sum.y, sum.z, sum.w};
  for (int i = 0; i < 4; ++i) {
    int o = group * kRows + output + i;
    if (o < in.outputs) in.write(token, o, y[i]);
  }
}

// kRounds: the most rounds of inputs that a block has.
template <int kTokens, int kRounds>
__global__ void __launch_bounds__(kThreads, 1)  // one block, so that threads have enough registers
    multiply_groups(const Product in, const Parts parts) {
  constexpr int kHalves = kTokens / kHalf;
  auto& shared = *reinterpret_cast<Shared<kTokens, kRounds>*>(dynamic_shared());
  int warp = threadIdx.x / 32, row_of_tile = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
  int cluster = blockIdx.x / parts.num, part = blockIdx.x % parts.num;
  int num_clusters = gridDim.x / parts.num;
  int num_groups = (in.outputs + kRows - 1) / kRows;
  if (parts.num > 1) arrive_at_cluster();

  // Inputs past the end count as zero. For rows and tokens past the end the last ones are read, so
  // that copies need no branch; their outputs are not written.
  int first_input = part * parts.inputs + warp * kPiece + 8 * column;
  int num_inputs = min(in.inputs, (part + 1) * parts.inputs) - first_input;
  auto is_there = [&](int round) { return round * kRound < num_inputs; };
  const uint16_t* rows[kTiles];
  auto begin_group = [&](int group) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      int64_t o = min(group * kRows + kTile * tile + row_of_tile, in.outputs - 1);
      rows[tile] = in.weight + o * in.weight_stride + first_input;
    }
  };
  auto copy_weight = [&](int round) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      begin_copy(&shared.weight[round][tile][threadIdx.x], rows[tile] + round * kRound,
                 is_there(round));
  };
  auto token_at = [&](int round, int half) {
    int64_t token = min(kHalf * half + row_of_tile, in.tokens - 1);
    const uint16_t* place = in.x + token * in.x_stride + first_input + round * kRound;
    return is_there(round) ? load_fresh(reinterpret_cast<const uint4*>(place)) : uint4{};
  };

  begin_group(cluster);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    copy_weight(round);
    group_copies();
  }
  wait_for_inputs();
  let_next_start();
  uint4 x[kRounds][kHalves];
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int half = 0; half < kHalves; ++half) x[round][half] = token_at(round, half);

  auto sum_of_warps = [&](int token, int row) {
    return sum_of(kWarps, [&](int w) { return &shared.of_warp[w][token][row]; });
  };
  int nth = 0;
  for (int group = cluster; group < num_groups; group += num_clusters, ++nth) {
    bool has_next = group + num_clusters < num_groups;
    if (has_next) begin_group(group + num_clusters);
    forget(num_inputs);  // otherwise the compiler holds a condition for each round in a register
    // The halves of a piece have separate accumulators, so that no product waits for the one
    // before.
    float sum[kTiles][2][4] = {};
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      wait_for_copies<kRounds - 1>();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint4 w = shared.weight[round][tile][threadIdx.x];
        uint4 low = x[round][0], high{};
        if constexpr (kHalves > 1) high = x[round][1];
        multiply(sum[tile][0], {low.x, high.x, low.y, high.y}, {w.x, w.y});
        multiply(sum[tile][1], {low.z, high.z, low.w, high.w}, {w.z, w.w});
      }
      if (has_next) copy_weight(round);
      group_copies();  // an empty group, too: each wait counts the groups that are in flight
    }

    if (nth) __syncthreads();  // until the sums of the previous group are read
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        auto& [even, odd] = sum[tile];
        int i = 2 * half, token = kHalf * half + row_of_tile;
        float* place = &shared.of_warp[warp][token][kTile * tile + 2 * column];
        *reinterpret_cast<float2*>(place) = {even[i] + odd[i], even[i + 1] + odd[i + 1]};
      }
    __syncthreads();
    constexpr int kQuads = kRows / 4;
    if (parts.num == 1) {
#pragma unroll 1
      for (int i = threadIdx.x; i < in.tokens * kQuads; i += kThreads)
        write(in, group, i / kQuads, i % kQuads * 4, sum_of_warps);
      continue;
    }

    // The blocks of a cluster own the groups in turn. Each block sends its part to the owner.
    int joined = nth % kJoined;
    auto place_of = [&](int j, int from, int token, int row) {
      return &shared.of_part[j / parts.num * parts.num + from][token][row];
    };
    if (joined == 0) wait_for_cluster();  // until all have started, or read the earlier parts
#pragma unroll 1
    for (int i = threadIdx.x; i < in.tokens * kQuads; i += kThreads) {
      int token = i / kQuads, row = i % kQuads * 4;
      store_in_cluster(place_of(joined, part, token, row), sum_of_warps(token, row),
                       joined % parts.num);
    }
    if (has_next && joined < kJoined - 1) continue;
    arrive_at_cluster();
    wait_for_cluster();
    for (int j = part; j <= joined; j += parts.num) {
      auto sum_of_parts = [&](int token, int row) {
        return sum_of(parts.num, [&](int from) { return place_of(j, from, token, row); });
      };
#pragma unroll 1
      for (int i = threadIdx.x; i < in.tokens * kQuads; i += kThreads)
        write(in, group - (joined - j) * num_clusters, i / kQuads, i % kQuads * 4, sum_of_parts);
    }
    if (has_next) arrive_at_cluster();
  }
}

// Divides the inputs into parts: the smallest power of two that kMostRounds allows.
inline Parts divide(const Product& in) {
  Parts parts{1, 0};
  int num_rounds = (in.inputs + kRound - 1) / kRound;
  while (num_rounds > kMostRounds * parts.num) parts.num *= 2;
  TVM_FFI_ICHECK(parts.num <= kMostParts) << in.inputs << " inputs are too many";
  parts.inputs = (num_rounds + parts.num - 1) / parts.num * kRound;
  return parts;
}

template <int kTokens, int kRounds>
void start(const Product& in, Parts parts, DLDevice device) {
  constexpr int kBytes = sizeof(Shared<kTokens, kRounds>);
  auto kernel = multiply_groups<kTokens, kRounds>;
  bool is_divided = parts.num > 1;
  int at_once = is_divided ? num_clusters_at_once(kernel, kThreads, parts.num, kBytes)
                           : num_multiprocessors(device.device_id);
  TVM_FFI_ICHECK(at_once > 0) << "no cluster of " << parts.num << " blocks runs on this device";
  int num_groups = (in.outputs + kRows - 1) / kRows;
  launch(Start{true, is_divided ? parts.num : 0, kBytes}, device,
         min(num_groups, at_once) * parts.num, kThreads, kernel, in, parts);
}

template <int kRounds>
void start_for(const Product& in, Parts parts, DLDevice device) {
  if (in.tokens == 0 || in.outputs == 0) return;
  if (in.tokens <= kHalf) start<kHalf, kRounds>(in, parts, device);
  else start<kFragment, kRounds>(in, parts, device);
}

}  // namespace

void few_token_linear(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView y_TO) {
  Product in(x_TI, weight_OI, bias_O, y_TO);
  Parts parts = divide(in);
  if (parts.inputs <= 6 * kRound) start_for<6>(in, parts, x_TI.device());
  else if (parts.inputs <= 8 * kRound) start_for<8>(in, parts, x_TI.device());
  else start_for<kMostRounds>(in, parts, x_TI.device());
}

// The most inputs that `few_token_linear` takes on the device of a tensor; 0 if the shared memory
// of a block is too small there. More inputs than one block takes need a cluster.
int64_t most_inputs_of_few_tokens(TensorView on_device) {
  int device = on_device.device().device_id;
  if (most_shared_memory(device) < sizeof(Shared<kFragment, kMostRounds>)) return 0;
  return kMostRounds * kRound * (has_clusters(device) ? kMostParts : 1);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_token_linear, few_token_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(most_inputs_of_few_tokens, most_inputs_of_few_tokens);

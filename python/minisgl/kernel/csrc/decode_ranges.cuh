// Attention of single queries by ranges of equal length, however long or short the contexts are.
//
// The contexts of a step, laid end to end, are one line of tiles of 16 tokens. It is cut into
// ranges of equal length, each for one warp per kv head ("Stream-K", Osama et al. 2023,
// arXiv:2301.03598). A cut inside a request makes splits of its context, called `part` in the code.
// Each split is softmaxed by itself, and the warp that finishes last merges them ("Flash-Decoding",
// Dao et al. 2023).
//
// If contexts of a group begin with the same pages, their queries may have attended to these
// together ("Hydragen", Juravsky et al. 2024, arXiv:2402.05099). The line then has only the rest of
// these contexts, and the warp with the first tile of a request merges the results of those pages.

#pragma once

#include <cstdint>

#include "decode_warp.cuh"

// The place of a request on the line of tiles: its first tile, the number of its tokens on the
// line, its row of the page table, and the index in that row of its first page on the line.
struct Request {
  int first_tile, length, row, first_page;

  __host__ __device__ int num_tiles() const { return (length + kTile - 1) / kTile; }
};

// Where a range begins: at which tile of which request.
struct RangeStart {
  int b, tile, unused[2];
  Request request;
};

// What all ranges have in common: the tiles of a range, the tiles of the line, and whether clusters
// suit the contexts.
struct Division {
  int size, num_tiles, suits_clusters, unused;
};

// The output of `plan_decode`: the division, the requests, and where each range begins.
struct Plan {
  int* data;
  int num_requests;

  __device__ Division* division() const { return reinterpret_cast<Division*>(data); }
  __device__ Request* request(int b) const { return reinterpret_cast<Request*>(data) + 1 + b; }
  __device__ RangeStart* start_of(int range) const {
    return reinterpret_cast<RangeStart*>(data + 4 * (1 + num_requests)) + range;
  }
  __device__ Division fresh_division() const {
    int4 x = load_fresh(reinterpret_cast<const int4*>(data));
    return {x.x, x.y, x.z, x.w};
  }
  __device__ Request fresh_request(int b) const { return fresh(request(b)); }
  __device__ RangeStart fresh_start(int range) const {
    const RangeStart* start = start_of(range);
    int2 x = load_fresh(reinterpret_cast<const int2*>(start));
    return {x.x, x.y, {}, fresh(&start->request)};
  }

 private:
  static __device__ Request fresh(const Request* request) {
    int4 x = load_fresh(reinterpret_cast<const int4*>(request));
    return {x.x, x.y, x.z, x.w};
  }
};

// Where the results of a request's queries for its shared prefix are. The prefix was attended to in
// parts: `first` is the place of the first head in the first part, `step` the distance to the next
// part, and `num` the number of parts.
struct PartPlaces {
  int first, step, num, unused;
};

// The results for shared prefixes. At each place of a kv head they have the output before it is
// divided by the sum, the maximum of the scores, and the sum of their weights.
struct SharedPrefix {
  const float *output, *top, *sum;
  const PartPlaces* places;  // one for each request
  int num_places;            // places of each kv head
};

struct Inputs : Decodes {
  Plan plan;
  float *part, *part_top;  // two splits of each range, for each kv head
  int* num_done;           // finished splits of each request and kv head; zero before and after
  SharedPrefix prefix;
};

inline Inputs inputs_of(TensorView q_BNH, TensorView k_PQKH, TensorView v_PQKH,
                        TensorView page_table_RP, TensorView plan_Z, TensorView part_Z,
                        TensorView top_Z, TensorView num_done_Z, TensorView o_BNH, double scale) {
  return {decodes_of(q_BNH, k_PQKH, v_PQKH, page_table_RP, o_BNH, scale),
          Plan{data_of<int>(plan_Z), static_cast<int>(q_BNH.size(0))},
          data_of<float>(part_Z),
          data_of<float>(top_Z),
          data_of<int>(num_done_Z),
          {}};
}

template <int kWidth>
struct RangeWarp : DecodeWarp<kWidth> {
  using Base = DecodeWarp<kWidth>;
  using Base::c, Base::g, Base::head, Base::o, Base::sum, Base::top;

  const Inputs& in;

  __device__ RangeWarp(const Inputs& in, int head) : Base(in, head), in(in) {}

  // Merges the results of a request's queries for its shared prefix. To be called after `end`.
  __device__ void add_prefix(int b) {
    const SharedPrefix& prefix = in.prefix;
    PartPlaces places = prefix.places[b];
    int64_t first = int64_t(head) * prefix.num_places + places.first;
    auto place_of = [&](int row, int part) {  // for a row past the end, the last one
      return first + part * places.step + min(row, in.group - 1);
    };
    float new_top = top;
    for (int part = 0; part < places.num; ++part)
      new_top = fmaxf(new_top, kLog2e * prefix.top[place_of(g, part)]);
    float shrink = exp2f(top - new_top);
    float left = this->of_head(shrink, 2 * c), right = this->of_head(shrink, 2 * c + 1);
    for (auto& x : o) x[0] *= left, x[1] *= right, x[2] *= left, x[3] *= right;
    top = new_top;
    sum *= shrink;
#pragma unroll 4
    for (int part = 0; part < places.num; ++part) {
      float weight = exp2f(kLog2e * prefix.top[place_of(g, part)] - top);
      sum += weight * prefix.sum[place_of(g, part)];
      for (int side = 0; side < 2; ++side) {
        float of_row = this->of_head(weight, 2 * c + side);
        auto numbers = prefix.output + place_of(2 * c + side, part) * kWidth + 8 * g;
        for (int j = 0; j < kWidth / 64; ++j)
          for (int p = 0; p < 4; p += 2) {
            float4 x = *reinterpret_cast<const float4*>(numbers + 64 * j + 2 * p);
            o[4 * j + p][side] += of_row * x.x;
            o[4 * j + p][side + 2] += of_row * x.y;
            o[4 * j + p + 1][side] += of_row * x.z;
            o[4 * j + p + 1][side + 2] += of_row * x.w;
          }
      }
    }
  }

  // Writes the output. A thread has two heads, and 8 of each 64 dimensions.
  __device__ void write(int b) const {
    for (int side = 0; side < 2; ++side) {
      float factor = 1 / this->of_head(sum, 2 * c + side);
      if (2 * c + side >= in.group) continue;
      auto row = in.output(b, head, 2 * c + side, kWidth) + 8 * g;
      for (int j = 0; j < kWidth / 64; ++j) {
        uint32_t word[4];
        for (int p = 0; p < 4; ++p)
          word[p] = pack(o[4 * j + p][side] * factor, o[4 * j + p][side + 2] * factor);
        *reinterpret_cast<uint4*>(row + 64 * j) = {word[0], word[1], word[2], word[3]};
      }
    }
  }

  __device__ float* part_of(int place) const {
    return in.part + int64_t(place * in.num_kv_heads + head) * in.group * kWidth;
  }

  __device__ float* top_of(int place) const {
    return in.part_top + (place * in.num_kv_heads + head) * 2 * kRows;
  }

  // Counts this split of a request as written. Returns whether it is the last one: then all others
  // can be read.
  __device__ bool is_last(int b, int num_parts) const {
    __threadfence();
    __syncwarp();
    int num = 0;
    if (this->lane == 0) {
      int* done = in.num_done + b * in.num_kv_heads + head;
      num = atomicAdd(done, 1) + 1;
      if (num == num_parts) *done = 0;
    }
    num = __shfl_sync(0xffffffff, num, 0);
    __threadfence();
    return num == num_parts;
  }

  // Merges the splits of a request: at `first`, then at every second place from `second` on.
  __device__ void join(int b, int num_parts, int first, int second) const {
    if (in.group <= 2)
      join_rows<2>(b, num_parts, first, second);
    else
      join_rows<4>(b, num_parts, first, second);
  }

  // Each iteration merges kNum rows, of which a thread has four dimensions. It has no branches, so
  // that the loads of several splits overlap. For rows past the end it takes the last one again.
  template <int kNum>
  __device__ void join_rows(int b, int num_parts, int first, int second) const {
    int d = 4 * this->lane;
    if (d >= kWidth) return;
    for (int begin = 0; begin < in.group; begin += kNum) {
      int row[kNum];
      float most[kNum], total[kNum] = {}, result[kNum][4] = {};
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        row[r] = min(begin + r, in.group - 1);
        most[r] = kNone;
      }
#pragma unroll(16 / kNum)
      for (int i = 0; i < num_parts; ++i) {
        int place = i == 0 ? first : second + 2 * (i - 1);
#pragma unroll
        for (int r = 0; r < kNum; ++r) {
          float x_top = load_fresh(top_of(place) + row[r]);
          float x_sum = load_fresh(top_of(place) + kRows + row[r]);
          auto numbers = part_of(place) + row[r] * kWidth + d;
          float4 x = load_fresh(reinterpret_cast<const float4*>(numbers));
          float new_most = fmaxf(most[r], x_top);
          float shrink = exp2f(most[r] - new_most), weight = exp2f(x_top - new_most);
          most[r] = new_most;
          total[r] = total[r] * shrink + x_sum * weight;
          result[r][0] = result[r][0] * shrink + x.x * weight;
          result[r][1] = result[r][1] * shrink + x.y * weight;
          result[r][2] = result[r][2] * shrink + x.z * weight;
          result[r][3] = result[r][3] * shrink + x.w * weight;
        }
      }
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        float factor = 1 / total[r], (&x)[4] = result[r];
        uint2 words = {pack(x[0] * factor, x[1] * factor), pack(x[2] * factor, x[3] * factor)};
        auto output = in.output(b, head, row[r], kWidth) + d;
        *reinterpret_cast<uint2*>(output) = words;
      }
    }
  }
};

// Whether no kernel of this step writes to a tile, so that it can be loaded early. The last tile
// has the token of this step. The tile before it may end with a token that another request computes
// in this step for both.
__device__ inline bool is_older_tile(int tile, int num_tiles) { return tile + 2 < num_tiles; }

// Attends to one range for one kv head; `index` numbers these pairs. Waits for the inputs unless
// the range is empty.
template <int kWidth, bool kHasPrefix = false>
__device__ void attend_range(const Inputs& in, int index) {
  int range = index / in.num_kv_heads;
  RangeWarp<kWidth> warp(in, index % in.num_kv_heads);
  typename DecodeWarp<kWidth>::Tile now, next;
  auto [size, num_tiles, suits_clusters, unused_2] = in.plan.fresh_division();
  auto [b, begin, unused, request] = in.plan.fresh_start(range);
  int place = range * size, end_of_range = min(place + size, num_tiles);
  if (place >= end_of_range) return;
  const int* pages = in.pages_of(request.row) + request.first_page;
  bool is_old = is_older_tile(begin, request.num_tiles());
  if (is_old) warp.load(now, in.slot_of(pages, begin));
  wait_for_inputs();
  let_next_start();
  if (!is_old) warp.load(now, in.slot_of(pages, begin));
  while (true) {
    auto [first, length, row, first_page] = request;
    int num = request.num_tiles();
    int end = min(begin + end_of_range - place, num);
    int end_place = place + end - begin;
    bool has_more = end_place < end_of_range;
    if (has_more) request = in.plan.fresh_request(b + 1);
    warp.begin(b);
    int64_t slot = begin + 1 < end ? in.slot_of(pages, begin + 1) : 0;
    for (int tile = begin; tile < end; ++tile) {
      if (tile + 1 < end) warp.load(next, slot);
      if (tile + 2 < end) slot = in.slot_of(pages, tile + 2);
      warp.attend(now, length - tile * kTile);
      now = next;
    }
    warp.end();
    if (kHasPrefix && begin == 0 && first_page > 0) warp.add_prefix(b);
    int first_range = first / size, num_parts = (first + num - 1) / size - first_range + 1;
    if (num_parts == 1) {
      warp.write(b);
    } else {
      int part = 2 * range + (place > range * size);
      warp.write_part(warp.part_of(part), warp.top_of(part));
      if (warp.is_last(b, num_parts))
        warp.join(b, num_parts, 2 * first_range + (first > first_range * size),
                  2 * first_range + 2);
    }
    if (!has_more) return;
    pages = in.pages_of(request.row) + request.first_page;
    warp.load(now, in.slot_of(pages, 0));
    place = end_place;
    begin = 0;
    ++b;
  }
}

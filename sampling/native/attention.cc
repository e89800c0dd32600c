// Attention of one new token a row over the keys and values that its row of the cache holds.
//
// XLA for CPUs copies a block of the cache before it multiplies it, or writes out all products before it adds them up. Here each
// number is read where it lies. A row is worked out by itself, in an order that follows from its own position alone: no batch mate,
// no slot and no number of threads has a part in its bits.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr size_t kLanes = 16;  // partial results of a sum or maximum; part of its bits

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87. The polynomial is that of Cephes' expf (S. Moshier).
inline float Exp(float x) {
  const float kept = x < -87.0f ? -87.0f : x;  // a NaN stays
  const float shifted = kept * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
  const float n = shifted - 12582912.0f;
  const float r = (kept - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;  // 2^n
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

// out[w] = scale * sum_i x[i] * y[i * stride + w], added up in the order of i.
template <size_t kWidth>
inline void AddUp(const float* x, const float* y, size_t count, size_t stride, float scale, bool more, float* out) {
  float sum[kWidth];
  for (size_t w = 0; w < kWidth; ++w) sum[w] = more ? out[w] : 0.0f;
  for (size_t i = 0; i < count; ++i) {
    for (size_t w = 0; w < kWidth; ++w) sum[w] += x[i] * y[i * stride + w];
  }
  for (size_t w = 0; w < kWidth; ++w) out[w] = sum[w] * scale;
}

// The same for columns `first` to before `end`, and perhaps some beside them, of `width`. Which code serves a column depends on its
// place alone.
inline void AddUpColumns(const float* x, const float* y, size_t count, size_t width, size_t first, size_t end, float scale,
                         bool more, float* out) {
  size_t w = first / 64 * 64;
  for (; w < end && w + 64 <= width; w += 64) AddUp<64>(x, y + w, count, width, scale, more, out + w);
  for (; w < end && w + 16 <= width; w += 16) AddUp<16>(x, y + w, count, width, scale, more, out + w);
  for (; w < end; ++w) AddUp<1>(x, y + w, count, width, scale, more, out + w);
}

struct Work {
  const float* queries;       // [rows, kv_heads, group, head_dim]
  const float* keys;          // [blocks, cache_rows, kv_heads, head_dim, block_len]
  const float* values;        // [blocks, cache_rows, kv_heads, block_len, head_dim]
  const int32_t* positions;   // [rows], -1 sees nothing
  const int32_t* own;         // [rows], the cache's row of each
  float* mixed;               // as queries
  size_t rows, kv_heads, group, head_dim, blocks, cache_rows, block_len;
  int64_t window;             // keys that are seen, the query's own included; 0 for all
  float scale;
  std::atomic<size_t> next{0}, done{0};

  size_t items() const { return rows * kv_heads; }

  void Attend(size_t item, std::vector<float>& scores) const {
    const size_t row = item / kv_heads, head = item % kv_heads, capacity = blocks * block_len;
    const float* query = queries + item * group * head_dim;
    float* out = mixed + item * group * head_dim;
    std::fill(out, out + group * head_dim, 0.0f);
    if (positions[row] < 0) return;
    const size_t end = std::min<size_t>(positions[row] + 1, capacity);
    const size_t first = window > 0 && end > static_cast<size_t>(window) ? end - window : 0;
    const size_t size = head_dim * block_len, stride = cache_rows * kv_heads * size;
    const size_t lies = (own[row] * kv_heads + head) * size;

    for (size_t block = first / block_len; block * block_len < end; ++block) {
      const size_t begin = block * block_len, from = std::max(first, begin) - begin, to = std::min(end - begin, block_len);
      for (size_t n = 0; n < group; ++n) {
        AddUpColumns(query + n * head_dim, keys + block * stride + lies, head_dim, block_len, from, to, scale, false,
                     scores.data() + n * capacity + begin);
      }
    }
    for (size_t n = 0; n < group; ++n) {
      const float total = Weigh(scores.data() + n * capacity, first, end);
      for (size_t block = first / block_len; block * block_len < end; ++block) {
        const size_t begin = block * block_len, from = std::max(first, begin) - begin, to = std::min(end - begin, block_len);
        AddUpColumns(scores.data() + n * capacity + begin + from, values + block * stride + lies + from * head_dim, to - from,
                     head_dim, 0, head_dim, 1.0f, true, out + n * head_dim);
      }
      for (size_t d = 0; d < head_dim; ++d) out[n * head_dim + d] /= total;
    }
  }

  // Scores `first` to before `end` become weights, the largest of them 1; their sum.
  static float Weigh(float* scores, size_t first, size_t end) {
    float best[kLanes], sum[kLanes];
    std::fill(best, best + kLanes, -std::numeric_limits<float>::infinity());
    std::fill(sum, sum + kLanes, 0.0f);
    size_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      for (size_t l = 0; l < kLanes; ++l) best[l] = best[l] < scores[i + l] ? scores[i + l] : best[l];
    }
    for (size_t l = 0; i + l < end; ++l) best[l] = best[l] < scores[i + l] ? scores[i + l] : best[l];
    const float most = *std::max_element(best, best + kLanes);
    for (i = first; i < end; ++i) scores[i] = Exp(scores[i] - most);
    for (i = first; i + kLanes <= end; i += kLanes) {
      for (size_t l = 0; l < kLanes; ++l) sum[l] += scores[i + l];
    }
    for (size_t l = 0; i + l < end; ++l) sum[l] += scores[i + l];
    float total = 0.0f;
    for (float part : sum) total += part;
    return total;
  }

  void Run() {
    std::vector<float> scores(group * blocks * block_len);
    for (size_t item = next.fetch_add(1); item < items(); item = next.fetch_add(1)) {
      Attend(item, scores);
      done.fetch_add(1);
    }
  }
};

ffi::Error DecodeAttentionImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::Buffer<ffi::F32> keys,
                               ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> own,
                               ffi::ResultBuffer<ffi::F32> mixed, int64_t window, float scale) {
  const auto asked = queries.dimensions(), held = keys.dimensions();
  auto work = std::make_shared<Work>();
  work->queries = queries.typed_data(), work->keys = keys.typed_data(), work->values = values.typed_data();
  work->positions = positions.typed_data(), work->own = own.typed_data(), work->mixed = mixed->typed_data();
  work->rows = asked[0], work->kv_heads = asked[1], work->group = asked[2], work->head_dim = asked[3];
  work->blocks = held[0], work->cache_rows = held[1], work->block_len = held[4];
  work->window = window, work->scale = scale;
  // A helper that finds a thread too late finds no work either, and touches nothing else of this call: nobody waits for it.
  const size_t helpers = std::min<size_t>(std::max<int64_t>(pool.num_threads(), 1), work->items()) - 1;
  for (size_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();
  while (work->done.load() < work->items()) std::this_thread::yield();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodeAttention, DecodeAttentionImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale"));

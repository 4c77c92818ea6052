// Of each 2,048 elements of a chunk every thread has a share; which elements those are depends on how lists are aligned.
#pragma once

#include "cuda/memory.cuh"
#include "math/rows.h"

namespace amp_engine::cuda {

constexpr int kStride = 2048;  // elements from one share of a thread to its next

// Of blocks that sum: the lanes of math/reduction.h.
constexpr int kThreads = 256;
constexpr int kShare = kStride / kThreads;

// Of blocks that update without a sum. On an H200 two of them a multiprocessor reach 93 % of a copy's bandwidth, three 92 %,
// and four of 256 threads with shares of eight 90 %, as if memory liked fewer places at a time (docs/gpu.md).
constexpr int kUpdateThreads = 512;
constexpr int kUpdateShare = kStride / kUpdateThreads;

// Raw bits of a share of n elements; how they lie in the words is the map's.
template <int n>
struct RawOf {
  uint32_t word[n];
};

template <int n>
struct FloatsOf {
  float at[n];
};

using Raw = RawOf<kShare>;
using Floats = FloatsOf<kShare>;

// Two elements of a 16-bit type to a word, in the first half of the words.
template <int n>
AMP_DEVICE RawOf<n> rounded(FloatsOf<n> const& x, Type type) {
  RawOf<n> raw;
  if (type == Type::float32) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      raw.word[k] = bits_of(x.at[k]);
    }
  } else if (type == Type::float16) {
#pragma unroll
    for (int k = 0; k < n; k += 2) {
      raw.word[k / 2] = packed_f16(x.at[k], x.at[k + 1]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < n; k += 2) {
      raw.word[k / 2] = packed_bf16(x.at[k], x.at[k + 1]);
    }
  }
  return raw;
}

// One chunk of one tensor. Indices count from the chunk's start and fit an int; the address of the start needs 64 bits.
struct List {
  char* start;
  Type type;

  AMP_DEVICE List(void* data, Type type, uint32_t chunk)
      : start(static_cast<char*>(data) + int64_t(chunk) * kChunk * size_of(type)), type(type) {}

  AMP_DEVICE char* at(int i, Type type) const { return start + int64_t(i) * size_of(type); }
  // Whether Quads may be taken of it: the chunk is as aligned as its tensor.
  AMP_DEVICE bool has_quads() const { return is_aligned(start, 4 * int(size_of(type))); }
};

// Both maps let every instruction of a warp touch neighbouring addresses, and so whole sectors of 32 bytes. The octet
// 8 t ... 8 t + 7 would not: float32 needs two accesses for it, and each touches half of every sector.

// Of lists that are aligned to four of their elements. Thread t takes 4 t ... 4 t + 3 and, if its share is eight, the same
// 1,024 further on. 16-bit types: two elements to a word, in the first half of the words. A share of this map is whole.
template <int n>
struct QuadsOf {
  static constexpr int kShare = n;
  static constexpr bool kWhole = true;
  using Raw = RawOf<n>;
  using Floats = FloatsOf<n>;

  static AMP_DEVICE constexpr int offset(int k) { return k / 4 * (kStride / (n / 4)) + k % 4; }
  static AMP_DEVICE int position(int k) { return int(threadIdx.x) * 4 + offset(k); }

  static AMP_DEVICE Raw load(List const& list, Type type, int first, int) {
    Raw raw;
    char const* const at = list.at(first + position(0), type);
    if (type == Type::float32) {
#pragma unroll
      for (int k = 0; k < n; k += 4) {
        load_16(raw.word + k, at + offset(k) * 4);
      }
    } else {
#pragma unroll
      for (int k = 0; k < n; k += 4) {
        load_8(raw.word + k / 2, at + offset(k) * 2);
      }
    }
    return raw;
  }
  static AMP_DEVICE void store(List const& list, Type type, int first, int, Floats const& x) {
    char* const at = list.at(first + position(0), type);
    if (type == Type::float32) {
      Raw const raw = rounded(x, Type::float32);
#pragma unroll
      for (int k = 0; k < n; k += 4) {
        store_16(at + offset(k) * 4, raw.word + k);
      }
    } else {
      store_words(at, rounded(x, type));
    }
  }
  // Bits of a 16-bit type. By itself, since `store` by way of it spills.
  static AMP_DEVICE void store_halves(List const& list, int first, int, Raw const& raw) {
    store_words(list.at(first + position(0), Type::bfloat16), raw);
  }
  static AMP_DEVICE void store_words(char* at, Raw const& raw) {
#pragma unroll
    for (int k = 0; k < n; k += 4) {
      store_8(at + offset(k) * 2, raw.word + k / 2);
    }
  }
  static AMP_DEVICE uint16_t half(Raw const& raw, int k) { return uint16_t(raw.word[k / 2] >> k % 2 * 16); }
  static AMP_DEVICE Floats widened(Raw const& raw, Type type) {
    Floats x;
    if (type == Type::float32) {
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        x.at[k] = float_of(raw.word[k]);
      }
    } else if (type == Type::float16) {
#pragma unroll
      for (int k = 0; k < kShare; k += 2) {
        x.at[k] = widened_f16(raw.word[k / 2] & 0xffffu);
        x.at[k + 1] = widened_f16(raw.word[k / 2] >> 16);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kShare; k += 2) {
        x.at[k] = float_of(raw.word[k / 2] << 16);
        x.at[k + 1] = float_of(raw.word[k / 2] & 0xffff0000u);
      }
    }
    return x;
  }
};

// Of any lists, for instance views of a flat buffer, and of what is left where no share is whole. Thread t takes t,
// t + the number of threads, ...; a word to an element. As many bytes are under way as in Quads, in four times as many
// instructions: on an H200 the update reaches 82 % of a copy's bandwidth where the 16-bit lists are not aligned, and 52 %
// where those of float32 are not.
// Peeling elements off up to the first aligned one serves only lists that are all misaligned alike, and would hand
// elements to other threads than the sums' order does.
template <int share>
struct SinglesOf {
  static constexpr int kShare = share;
  static constexpr bool kWhole = false;
  using Raw = RawOf<share>;
  using Floats = FloatsOf<share>;

  static AMP_DEVICE constexpr int offset(int k) { return k * (kStride / share); }
  static AMP_DEVICE int position(int k) { return int(threadIdx.x) + offset(k); }

  // Elements from `n` on are missing and given as 0.
  static AMP_DEVICE Raw load(List const& list, Type type, int first, int n) {
    Raw raw;
    int const i = first + position(0);
    char const* const at = list.at(i, type);
    if (type == Type::float32) {
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        raw.word[k] = load_4_if(i + offset(k) < n, at + offset(k) * 4);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        raw.word[k] = load_2_if(i + offset(k) < n, at + offset(k) * 2);
      }
    }
    return raw;
  }
  static AMP_DEVICE void store(List const& list, Type type, int first, int n, Floats const& x) {
    int const i = first + position(0);
    char* const at = list.at(i, type);
    if (type == Type::float32) {
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        store_4_if(i + offset(k) < n, at + offset(k) * 4, bits_of(x.at[k]));
      }
    } else {
      Raw const raw = rounded(x, type);
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        store_2_if(i + offset(k) < n, at + offset(k) * 2, raw.word[k / 2] >> k % 2 * 16);
      }
    }
  }
  static AMP_DEVICE void store_halves(List const& list, int first, int n, Raw const& raw) {
    int const i = first + position(0);
    char* const at = list.at(i, Type::bfloat16);
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      store_2_if(i + offset(k) < n, at + offset(k) * 2, raw.word[k / 2] >> k % 2 * 16);
    }
  }
  static AMP_DEVICE uint16_t half(Raw const& raw, int k) { return uint16_t(raw.word[k]); }
  static AMP_DEVICE Floats widened(Raw const& raw, Type type) {
    Floats x;
    if (type == Type::float32) {
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        x.at[k] = float_of(raw.word[k]);
      }
    } else if (type == Type::float16) {
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        x.at[k] = widened_f16(raw.word[k]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        x.at[k] = float_of(raw.word[k] << 16);
      }
    }
    return x;
  }
};

using Quads = QuadsOf<kShare>;
using Singles = SinglesOf<kShare>;

// The lanes of math/reduction.h: 8 t ... 8 t + 7. Of accumulators only.
struct Octets {
  static AMP_DEVICE int position(int k) { return int(threadIdx.x) * kShare + k; }
};

AMP_DEVICE int elements_of(uint32_t chunk, int64_t numel) {
  int64_t const left = numel - int64_t(chunk) * kChunk;
  return int(left < kChunk ? left : kChunk);
}

}  // namespace amp_engine::cuda

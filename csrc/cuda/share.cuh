// Each thread has a share of each 2,048 elements of a chunk. The alignment of the lists decides which elements.
#pragma once

#include "cuda/memory.cuh"
#include "math/rows.h"

namespace amp_engine::cuda {

constexpr int kStride = 2048;  // distance from one share of a thread to its next, in elements

constexpr uint32_t kWarp = 0xffffffffu;

// Threads of a block that checks or steps in a narrow form: the lanes of math/reduction.h.
constexpr int kThreads = 256;
constexpr int kShare = kStride / kThreads;

// Threads of a block that steps otherwise. On an H200 two such blocks per multiprocessor reach 94 % of a copy's
// bandwidth, three reach 92 %, and four blocks of 256 threads with shares of eight reach 90 %, as if memory preferred
// fewer places at a time (docs/gpu.md).
constexpr int kUpdateThreads = 512;
constexpr int kUpdateShare = kStride / kUpdateThreads;

// The raw bits of a share of n elements. The map decides how they lie in the words.
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

// A word has two elements of a 16-bit type, in the first half of the words.
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
  // True if Quads can access the chunk. A chunk is as aligned as its tensor.
  AMP_DEVICE bool has_quads() const { return is_aligned(start, 4 * int(size_of(type))); }
};

// In both maps each instruction of a warp accesses neighbouring addresses, and so whole sectors of 32 bytes. Octets of
// elements 8 t ... 8 t + 7 would not: in float32 an octet takes two accesses, and each touches half of every sector.

// For lists that are aligned to four of their elements. Thread t takes elements 4 t ... 4 t + 3 and, if its share is
// eight, also those 1,024 further on. A word has two elements of a 16-bit type, in the first half of the words. All
// elements of a share exist.
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
  // Stores bits of a 16-bit type. `store` does not use it, because that would spill.
  static AMP_DEVICE void store_halves(List const& list, int first, int, Raw const& raw) {
    store_words(list.at(first + position(0), Type::bfloat16), raw);
  }
  static AMP_DEVICE void store_words(char* at, Raw const& raw) {
#pragma unroll
    for (int k = 0; k < n; k += 4) {
      store_8(at + offset(k) * 2, raw.word + k / 2);
    }
  }
  // Bytes: four to a word. Eight threads have a block of math/blocks.h in four elements each.
  static constexpr int kInBlock = 4, kThreadsOfBlock = 8;
  static AMP_DEVICE Raw load_bytes(List const& list, int first, int) {
    Raw raw;
#pragma unroll
    for (int k = 0; k < n; k += 4) {
      raw.word[k / 4] = load_4(list.at(first + position(k), Type::byte));
    }
    return raw;
  }
  static AMP_DEVICE void store_bytes(List const& list, int first, int, Raw const& raw) {
#pragma unroll
    for (int k = 0; k < n; k += 4) {
      store_4(list.at(first + position(k), Type::byte), raw.word[k / 4]);
    }
  }
  static AMP_DEVICE uint32_t byte(Raw const& raw, int k) { return raw.word[k / 4] >> k % 4 * 8 & 0xffu; }
  static AMP_DEVICE void set_byte(Raw& raw, int k, uint32_t bits) { raw.word[k / 4] |= bits << k % 4 * 8; }
  static AMP_DEVICE uint16_t half(Raw const& raw, int k) { return uint16_t(raw.word[k / 2] >> k % 2 * 16); }
  static AMP_DEVICE void set_half(Raw& raw, int k, uint32_t bits) { raw.word[k / 2] |= bits << k % 2 * 16; }
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

// For lists of any alignment, for instance views of a flat buffer, and for the rest of a chunk that fills no stride.
// Thread t takes elements t, t + the number of threads, ..., one element per word. As many bytes are in flight as in
// Quads, in four times as many instructions. On an H200 the update reaches 83 % of a copy's bandwidth if the 16-bit
// lists are not aligned, and 52 % if the float32 lists are not. Peeling elements off up to the first aligned one would
// serve only lists that are all misaligned alike. It would also break the order of the sums, which decides the thread
// of each element.
template <int share>
struct SinglesOf {
  static constexpr int kShare = share;
  static constexpr bool kWhole = false;
  using Raw = RawOf<share>;
  using Floats = FloatsOf<share>;

  static AMP_DEVICE constexpr int offset(int k) { return k * (kStride / share); }
  static AMP_DEVICE int position(int k) { return int(threadIdx.x) + offset(k); }

  // Elements from `n` on are missing and are loaded as 0.
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
  // Bytes: one to a word. A warp has a block of math/blocks.h for each element of a share.
  static constexpr int kInBlock = 1, kThreadsOfBlock = 32;
  static AMP_DEVICE Raw load_bytes(List const& list, int first, int n) {
    Raw raw;
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      raw.word[k] = load_1_if(first + position(k) < n, list.at(first + position(k), Type::byte));
    }
    return raw;
  }
  static AMP_DEVICE void store_bytes(List const& list, int first, int n, Raw const& raw) {
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      store_1_if(first + position(k) < n, list.at(first + position(k), Type::byte), raw.word[k]);
    }
  }
  static AMP_DEVICE uint32_t byte(Raw const& raw, int k) { return raw.word[k]; }
  static AMP_DEVICE void set_byte(Raw& raw, int k, uint32_t bits) { raw.word[k] = bits; }
  static AMP_DEVICE uint16_t half(Raw const& raw, int k) { return uint16_t(raw.word[k]); }
  static AMP_DEVICE void set_half(Raw& raw, int k, uint32_t bits) { raw.word[k] = bits; }
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

AMP_DEVICE int elements_of(uint32_t chunk, int64_t numel) {
  int64_t const left = numel - int64_t(chunk) * kChunk;
  return int(left < kChunk ? left : kChunk);
}

}  // namespace amp_engine::cuda

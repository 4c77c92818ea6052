// Eight elements out of each 2,048 of a chunk are one thread's share; which eight depends on how the lists are aligned.
#pragma once

#include "cuda/memory.cuh"
#include "math/rows.h"

namespace amp_engine::cuda {

constexpr int kThreads = 256;  // of a block that does a chunk
constexpr int kShare = 8;
constexpr int kStride = kThreads * kShare;  // elements from one share of a thread to its next

// Raw bits of a share; how they lie in the words is the map's.
struct Raw {
  uint32_t word[kShare];
};

struct Floats {
  float at[kShare];
};

// Two elements of a 16-bit type to a word, the first four words.
AMP_DEVICE Raw rounded(Floats const& x, Type type) {
  Raw raw;
  if (type == Type::float32) {
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      raw.word[k] = bits_of(x.at[k]);
    }
  } else if (type == Type::float16) {
#pragma unroll
    for (int k = 0; k < kShare; k += 2) {
      raw.word[k / 2] = packed_f16(x.at[k], x.at[k + 1]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kShare; k += 2) {
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

// Of lists that are aligned to four of their elements. Thread t takes 4 t ... 4 t + 3 and the same 1,024 further on.
// 16-bit types: two elements to a word, the first four words. A share of this map is whole.
struct Quads {
  static constexpr bool kWhole = true;

  static AMP_DEVICE constexpr int offset(int k) { return k / 4 * (kStride / 2) + k % 4; }
  static AMP_DEVICE int position(int k) { return int(threadIdx.x) * 4 + offset(k); }

  static AMP_DEVICE Raw load(List const& list, Type type, int first, int) {
    Raw raw;
    char const* const at = list.at(first + position(0), type);
    if (type == Type::float32) {
      load_16(raw.word, at);
      load_16(raw.word + 4, at + offset(4) * 4);
    } else {
      load_8(raw.word, at);
      load_8(raw.word + 2, at + offset(4) * 2);
    }
    return raw;
  }
  static AMP_DEVICE void store(List const& list, Type type, int first, int, Floats const& x) {
    char* const at = list.at(first + position(0), type);
    if (type == Type::float32) {
      Raw const raw = rounded(x, Type::float32);
      store_16(at, raw.word);
      store_16(at + offset(4) * 4, raw.word + 4);
    } else {
      Raw const raw = rounded(x, type);
      store_8(at, raw.word);
      store_8(at + offset(4) * 2, raw.word + 2);
    }
  }
  // Bits of a 16-bit type. By itself, since `store` by way of it spills.
  static AMP_DEVICE void store_halves(List const& list, int first, int, Raw const& raw) {
    char* const at = list.at(first + position(0), Type::bfloat16);
    store_8(at, raw.word);
    store_8(at + offset(4) * 2, raw.word + 2);
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
// t + 256, ...; a word to an element. It is as fast: no arithmetic waits until all of a share is under way, as many
// bytes as in Quads, and memory is busy long before the four times as many instructions keep a multiprocessor busy.
// Peeling elements off up to the first aligned one serves only lists that are all misaligned alike, and would hand
// elements to other threads than the sums' order does.
struct Singles {
  static constexpr bool kWhole = false;

  static AMP_DEVICE constexpr int offset(int k) { return k * kThreads; }
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

// The lanes of math/reduction.h: 8 t ... 8 t + 7. Of accumulators only.
struct Octets {
  static AMP_DEVICE int position(int k) { return int(threadIdx.x) * kShare + k; }
};

AMP_DEVICE int elements_of(uint32_t chunk, int64_t numel) {
  int64_t const left = numel - int64_t(chunk) * kChunk;
  return int(left < kChunk ? left : kChunk);
}

}  // namespace amp_engine::cuda

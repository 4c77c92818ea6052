// Eight neighbouring elements, the share of one thread, and the chunk of a list that they come from.
#pragma once

#include "cuda/memory.cuh"
#include "math/rows.h"

namespace amp_engine::cuda {

constexpr int kThreads = 256;  // of a block that does a chunk
constexpr int kOctet = 8;
constexpr int kStride = kThreads * kOctet;  // elements from one octet of a thread to its next

// Raw bits of eight elements. 16-bit types: two to a word, the first four words.
struct Raw {
  uint32_t word[kOctet];
};

struct Floats {
  float at[kOctet];
};

AMP_DEVICE Floats widened(Raw const& raw, Type type) {
  Floats x;
  if (type == Type::float32) {
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      x.at[k] = float_of(raw.word[k]);
    }
  } else if (type == Type::float16) {
#pragma unroll
    for (int k = 0; k < kOctet; k += 2) {
      x.at[k] = widened_f16(raw.word[k / 2] & 0xffffu);
      x.at[k + 1] = widened_f16(raw.word[k / 2] >> 16);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kOctet; k += 2) {
      x.at[k] = float_of(raw.word[k / 2] << 16);
      x.at[k + 1] = float_of(raw.word[k / 2] & 0xffff0000u);
    }
  }
  return x;
}

AMP_DEVICE Raw rounded(Floats const& x, Type type) {
  Raw raw;
  if (type == Type::float32) {
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      raw.word[k] = bits_of(x.at[k]);
    }
  } else if (type == Type::float16) {
#pragma unroll
    for (int k = 0; k < kOctet; k += 2) {
      raw.word[k / 2] = packed_f16(x.at[k], x.at[k + 1]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kOctet; k += 2) {
      raw.word[k / 2] = packed_bf16(x.at[k], x.at[k + 1]);
    }
  }
  return raw;
}

// One chunk of one tensor. Indices count from the chunk's start and fit an int; the address of the start needs 64 bits.
struct List {
  char* start;
  Type type;
  bool wide;  // 16-byte accesses are allowed; the chunk is as aligned as its tensor

  AMP_DEVICE List(void* data, Type type, uint32_t chunk)
      : start(static_cast<char*>(data) + int64_t(chunk) * kChunk * size_of(type)), type(type), wide(is_wide(start)) {}

  // Octets whose eight elements all exist, of a list that is wide.
  AMP_DEVICE Raw load_wide(int i) const {
    return type == Type::float32 ? load_octet<Type::float32>(i) : load_octet<Type::float16>(i);
  }
  // The same where the type is known; one of 16 bits is as good as the other.
  template <Type kType>
  AMP_DEVICE Raw load_octet(int i) const {
    Raw raw;
    if constexpr (kType == Type::float32) {
      load_16_of_32(raw.word, start + int64_t(i) * 4);
      load_16_of_32(raw.word + 4, start + int64_t(i) * 4 + 16);
    } else {
      load_16(raw.word, start + int64_t(i) * 2);
    }
    return raw;
  }
  AMP_DEVICE void store_wide(int i, Raw const& raw) const {
    if (type == Type::float32) {
      store_16(start + int64_t(i) * 4, raw.word);
      store_16(start + int64_t(i) * 4 + 16, raw.word + 4);
    } else {
      store_16(start + int64_t(i) * 2, raw.word);
    }
  }

  // The first `count` elements of any octet; those missing are 0.
  AMP_DEVICE Raw load_narrow(int i, int count) const {
    Raw raw;
    if (type == Type::float32) {
#pragma unroll
      for (int k = 0; k < kOctet; ++k) {
        raw.word[k] = k < count ? load_4(start + int64_t(i + k) * 4) : 0u;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kOctet; k += 2) {
        uint32_t const low = k < count ? load_2(start + int64_t(i + k) * 2) : 0u;
        uint32_t const high = k + 1 < count ? load_2(start + int64_t(i + k + 1) * 2) : 0u;
        raw.word[k / 2] = low | high << 16;
      }
    }
    return raw;
  }
  AMP_DEVICE void store_narrow(int i, int count, Raw const& raw) const {
    if (type == Type::float32) {
#pragma unroll
      for (int k = 0; k < kOctet; ++k) {
        if (k < count) {
          store_4(start + int64_t(i + k) * 4, raw.word[k]);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kOctet; ++k) {
        if (k < count) {
          store_2(start + int64_t(i + k) * 2, raw.word[k / 2] >> k % 2 * 16);
        }
      }
    }
  }

  AMP_DEVICE Raw load(int i, int count) const {
    return wide && count == kOctet ? load_wide(i) : load_narrow(i, count);
  }
  AMP_DEVICE void store(int i, int count, Raw const& raw) const {
    if (wide && count == kOctet) {
      store_wide(i, raw);
    } else {
      store_narrow(i, count, raw);
    }
  }

  AMP_DEVICE bool has_quads() const { return is_aligned(start, 4 * int(size_of(type))); }
};

// Where the order of elements does not matter a thread takes its eight so that those of a warp lie side by side, and each
// access has whole sectors. An octet of float32 has not: a warp's first 16 bytes of each touch every sector for half of it.

// Elements i to i + 3, and as many half a stride on; of lists whose quads are aligned.
struct Quads {
  static constexpr int kFirst = 4;  // times the thread's number: its first element
  AMP_DEVICE static Raw load(List const& list, int i, int) {
    Raw raw;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      int64_t const at = i + q * (kStride / 2);
      if (list.type == Type::float32) {
        load_16(raw.word + 4 * q, list.start + at * 4);
      } else {
        load_8(raw.word + 2 * q, list.start + at * 2);
      }
    }
    return raw;
  }
  AMP_DEVICE static void store(List const& list, int i, int, Raw const& raw) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      int64_t const at = i + q * (kStride / 2);
      if (list.type == Type::float32) {
        store_16(list.start + at * 4, raw.word + 4 * q);
      } else {
        store_8(list.start + at * 2, raw.word + 2 * q);
      }
    }
  }
};

// Elements i, i + kThreads, i + 2 * kThreads and so on, eight of them, of which those from n on are 0 and not stored; of
// any list.
struct Singles {
  static constexpr int kFirst = 1;
  AMP_DEVICE static Raw load(List const& list, int i, int n) {
    Raw raw;
    if (list.type == Type::float32) {
#pragma unroll
      for (int k = 0; k < kOctet; ++k) {
        raw.word[k] = i + k * kThreads < n ? load_4(list.start + int64_t(i + k * kThreads) * 4) : 0u;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kOctet; k += 2) {
        int const j = i + k * kThreads;
        uint32_t const low = j < n ? load_2(list.start + int64_t(j) * 2) : 0u;
        uint32_t const high = j + kThreads < n ? load_2(list.start + int64_t(j + kThreads) * 2) : 0u;
        raw.word[k / 2] = low | high << 16;
      }
    }
    return raw;
  }
  AMP_DEVICE static void store(List const& list, int i, int n, Raw const& raw) {
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      int const j = i + k * kThreads;
      if (j >= n) {
        continue;
      }
      if (list.type == Type::float32) {
        store_4(list.start + int64_t(j) * 4, raw.word[k]);
      } else {
        store_2(list.start + int64_t(j) * 2, raw.word[k / 2] >> k % 2 * 16);
      }
    }
  }
};

AMP_DEVICE int elements_of(uint32_t chunk, int64_t numel) {
  int64_t const left = numel - int64_t(chunk) * kChunk;
  return int(left < kChunk ? left : kChunk);
}

AMP_DEVICE int octet_size(int i, int n) { return n - i < kOctet ? n - i : kOctet; }

}  // namespace amp_engine::cuda

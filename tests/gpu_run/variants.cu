// How best to walk memory in the update: Adam on FP32 masters from float16 gradients, half weights written back, 28 bytes
// a parameter. Threads of a block, how many elements each takes at once (by fours, so that a warp's accesses have no
// gaps), blocks that share a multiprocessor; accesses are kept out of L1 or not. A block does a chunk of 32 K elements.
//
// Prints one line of JSON for each. variants [parameters] [rounds]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <algorithm>
#include <vector>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define CHECK(call)                                                                              \
  do {                                                                                           \
    cudaError_t const error = (call);                                                            \
    if (error != cudaSuccess) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error));        \
      std::exit(1);                                                                              \
    }                                                                                            \
  } while (false)

constexpr int kChunk = 32 * 1024;

struct Lists {
  __half const* gradient;
  float* weight;
  float* exp_avg;
  float* exp_avg_sq;
  __half* copy;
  int64_t n;
};

template <bool kAllocate>
__device__ __forceinline__ uint4 load_16(void const* from) {
  uint4 x;
  if constexpr (kAllocate) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(__cvta_generic_to_global(from)));
  } else {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(__cvta_generic_to_global(from)));
  }
  return x;
}

template <bool kAllocate>
__device__ __forceinline__ uint2 load_8(void const* from) {
  uint2 x;
  if constexpr (kAllocate) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(__cvta_generic_to_global(from)));
  } else {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(__cvta_generic_to_global(from)));
  }
  return x;
}

template <bool kAllocate>
__device__ __forceinline__ void store_16(void* to, uint4 x) {
  if constexpr (kAllocate) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w));
  } else {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
  }
}

__device__ __forceinline__ void adam(float g, uint32_t& weight, uint32_t& exp_avg, uint32_t& exp_avg_sq) {
  float m = __uint_as_float(exp_avg);
  float v = __uint_as_float(exp_avg_sq);
  float w = __uint_as_float(weight);
  g *= 1.0f / 1024.0f;
  m = fmaf(0.1f, g - m, m);
  v = fmaf(0.001f * g, g, v * 0.999f);
  w = fmaf(-1e-5f, m / fmaf(sqrtf(v), 1.01f, 1e-8f), fmaf(-1e-7f, w, w));
  exp_avg = __float_as_uint(m);
  exp_avg_sq = __float_as_uint(v);
  weight = __float_as_uint(w);
}

__device__ __forceinline__ float half_at(uint32_t word, int k) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(k ? word >> 16 : word & 0xffffu)));
}

__device__ __forceinline__ uint32_t packed(uint32_t low, uint32_t high) {
  return uint32_t(__half_as_ushort(__float2half_rn(__uint_as_float(low)))) |
         uint32_t(__half_as_ushort(__float2half_rn(__uint_as_float(high)))) << 16;
}

__device__ __forceinline__ void step(uint32_t g, uint32_t& w0, uint32_t& w1, uint32_t& m0, uint32_t& m1, uint32_t& v0,
                                     uint32_t& v1) {
  adam(half_at(g, 0), w0, m0, v0);
  adam(half_at(g, 1), w1, m1, v1);
}

// Four elements: their gradients in two words, the rest in four.
__device__ __forceinline__ uint2 step(uint2 g, uint4& w, uint4& m, uint4& v) {
  step(g.x, w.x, w.y, m.x, m.y, v.x, v.y);
  step(g.y, w.z, w.w, m.z, m.w, v.z, v.w);
  return make_uint2(packed(w.x, w.y), packed(w.z, w.w));
}

template <int kThreads, int kShare, int kBlocks, bool kAllocate>
__global__ void __launch_bounds__(kThreads, kBlocks) update(Lists const a) {
  constexpr int kFours = kShare / 4;
  constexpr int kNext = kThreads * 4;  // from four elements of a thread to its next four
  int64_t const begin = int64_t(blockIdx.x) * kChunk;
  int64_t const left = a.n - begin;
  int const n = int(left < kChunk ? left : kChunk);  // a multiple of what a block takes at once
#pragma unroll 1
  for (int i = int(threadIdx.x) * 4; i < n; i += kThreads * kShare) {
    int64_t const p = begin + i;
    uint2 g[kFours];
    uint4 w[kFours], m[kFours], v[kFours];
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      g[k] = load_8<kAllocate>(a.gradient + p + k * kNext);
    }
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      w[k] = load_16<kAllocate>(a.weight + p + k * kNext);
    }
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      m[k] = load_16<kAllocate>(a.exp_avg + p + k * kNext);
    }
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      v[k] = load_16<kAllocate>(a.exp_avg_sq + p + k * kNext);
    }
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      uint2 const copy = step(g[k], w[k], m[k], v[k]);
      store_16<kAllocate>(a.exp_avg + p + k * kNext, m[k]);
      store_16<kAllocate>(a.exp_avg_sq + p + k * kNext, v[k]);
      store_16<kAllocate>(a.weight + p + k * kNext, w[k]);
      *reinterpret_cast<uint2*>(a.copy + p + k * kNext) = copy;
    }
  }
}

__global__ void fill(__half* gradient, float* weight, float* exp_avg, float* exp_avg_sq, int64_t n) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    uint32_t x = uint32_t(i) * 2654435761u;
    x = (x ^ x >> 15) * 2246822519u;
    x ^= x >> 13;
    gradient[i] = __float2half_rn(float(x >> 16) / 32768.0f - 1.0f);
    weight[i] = float(x & 0xffffu) / 65536.0f - 0.5f;
    exp_avg[i] = 1e-4f * weight[i];
    exp_avg_sq[i] = 1e-8f * float(x >> 20);
  }
}

struct Variant {
  void (*kernel)(Lists);
  int threads, share, blocks;
  bool allocate;
  std::vector<float> ms{};
  cudaEvent_t start{}, end{};
};

template <int kThreads, int kShare, int kBlocks>
void add(std::vector<Variant>& variants) {
  variants.push_back({update<kThreads, kShare, kBlocks, false>, kThreads, kShare, kBlocks, false});
  variants.push_back({update<kThreads, kShare, kBlocks, true>, kThreads, kShare, kBlocks, true});
}

float median(std::vector<float> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

int main(int argc, char** argv) {
  int64_t const n = (argc > 1 ? std::atoll(argv[1]) : 256'000'000) / 65536 * 65536;
  int const rounds = argc > 2 ? std::atoi(argv[2]) : 15;
  Lists a{};
  __half* gradient;
  CHECK(cudaMalloc(&gradient, n * 2));
  CHECK(cudaMalloc(&a.weight, n * 4));
  CHECK(cudaMalloc(&a.exp_avg, n * 4));
  CHECK(cudaMalloc(&a.exp_avg_sq, n * 4));
  CHECK(cudaMalloc(&a.copy, n * 2));
  float *from, *to;
  CHECK(cudaMalloc(&from, n * 4));
  CHECK(cudaMalloc(&to, n * 4));
  CHECK(cudaMemset(from, 0x3c, n * 4));
  a.gradient = gradient;
  a.n = n;
  fill<<<2048, 256>>>(gradient, a.weight, a.exp_avg, a.exp_avg_sq, n);
  CHECK(cudaDeviceSynchronize());

  std::vector<Variant> variants;
  variants.push_back({nullptr, 0, 0, 0, false});  // the copy
  add<256, 8, 4>(variants), add<256, 8, 3>(variants), add<256, 4, 8>(variants), add<256, 4, 4>(variants);
  add<512, 8, 2>(variants), add<512, 4, 4>(variants), add<512, 4, 3>(variants), add<512, 4, 2>(variants);
  add<1024, 4, 2>(variants), add<1024, 4, 1>(variants);

  for (Variant& v : variants) {
    CHECK(cudaEventCreate(&v.start));
    CHECK(cudaEventCreate(&v.end));
  }
  for (int round = -2; round < rounds; ++round) {  // two to warm up
    for (Variant& v : variants) {  // queued behind one another: no time of the host is in between
      CHECK(cudaEventRecord(v.start));
      if (v.kernel) {
        v.kernel<<<unsigned((n + kChunk - 1) / kChunk), v.threads>>>(a);
        CHECK(cudaGetLastError());
      } else {
        CHECK(cudaMemcpyAsync(to, from, n * 4, cudaMemcpyDeviceToDevice));
      }
      CHECK(cudaEventRecord(v.end));
    }
    CHECK(cudaDeviceSynchronize());
    for (Variant& v : variants) {
      float ms;
      CHECK(cudaEventElapsedTime(&ms, v.start, v.end));
      if (round >= 0) {
        v.ms.push_back(ms);
      }
    }
  }
  double const copy = 8.0 * double(n) / median(variants[0].ms) / 1e6;
  std::printf("{\"what\": \"copy\", \"ms\": %.4f, \"gb_per_s\": %.1f}\n", median(variants[0].ms), copy);
  for (Variant const& v : variants) {
    if (v.kernel) {
      double const rate = 28.0 * double(n) / median(v.ms) / 1e6;
      std::printf("{\"what\": \"%d threads, %d elements each, %d blocks, %s\", \"ms\": %.4f, \"gb_per_s\": %.1f, "
                  "\"of_copy\": %.4f}\n",
                  v.threads, v.share, v.blocks, v.allocate ? "default" : "no_allocate", median(v.ms), rate, rate / copy);
    }
  }
  return 0;
}

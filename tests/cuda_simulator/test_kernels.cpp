// The sources of csrc/cuda on the simulator against the CPU backend: the same bits, each element once.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <type_traits>

#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/share.cuh"
#include "math/coefficients.h"

namespace amp_engine {
namespace {

std::mt19937 random_bits(1);
int failures = 0;

#define EXPECT(condition, ...)                                                \
  do {                                                                        \
    if (!(condition) && ++failures < 20) {                                    \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);             \
      std::printf(__VA_ARGS__);                                               \
      std::printf("\n");                                                      \
    }                                                                         \
  } while (false)

template <class T>
T pick(std::initializer_list<T> values) {
  return values.begin()[random_bits() % values.size()];
}

bool chance(unsigned one_in) { return random_bits() % one_in == 0; }

float uniform(float low, float high) { return low + (high - low) * float(random_bits() >> 8) * 0x1p-24f; }

// Magnitudes so far apart that even a sum in float64 shows its order.
float scattered() {
  float const magnitude = std::ldexp(uniform(1.0f, 2.0f), int(random_bits() % 36) - 20);
  return chance(2) ? magnitude : -magnitude;
}

// A tensor in memory of its own, of exactly its size, `offset` elements from a multiple of 64 bytes.
struct Tensor {
  Type type;
  int64_t numel;
  int64_t offset;
  std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};

  Tensor(Type type, int64_t numel, int64_t offset) : type(type), numel(numel), offset(offset) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, size_t((offset + numel) * size_of(type)) + 1)) {
      std::abort();
    }
    memory.reset(static_cast<char*>(p));
  }
  Tensor(Tensor const& other) : Tensor(other.type, other.numel, other.offset) {
    std::memcpy(data(), other.data(), bytes());
  }
  Tensor(Tensor&&) = default;

  char* data() const { return memory.get() + offset * size_of(type); }
  size_t bytes() const { return size_t(numel * size_of(type)); }
  Tensor& randomize() {
    for (size_t i = 0; i < bytes(); ++i) {
      data()[i] = char(random_bits());
    }
    return *this;
  }
  void set(int64_t i, float x) {
    if (type == Type::float32) {
      std::memcpy(data() + i * 4, &x, 4);
    } else {
      uint16_t const bits = type == Type::float16 ? f16_from_float(x) : bf16_from_float(x);
      std::memcpy(data() + i * 2, &bits, 2);
    }
  }
  // Any remainders of weights of 24 bits, none of which is a tie.
  Tensor& no_ties() {
    for (int64_t i = 0; i < numel; ++i) {
      data()[i] = char(0x81 + random_bits() % 255);
    }
    return *this;
  }
  // Any codes, with exponents near that of 1.
  Tensor& in_blocks(int64_t n) {
    randomize();
    for (int64_t i = n; i < numel; ++i) {
      data()[i] = char(100 + random_bits() % 30);
    }
    return *this;
  }
  Tensor& fill(float low, float high) {
    for (int64_t i = 0; i < numel; ++i) {
      set(i, uniform(low, high));
    }
    return *this;
  }
};

Tensor scattered(Tensor tensor) {
  for (int64_t i = 0; i < tensor.numel; ++i) {
    tensor.set(i, tensor.type == Type::float16 ? uniform(-3.0f, 3.0f) : scattered());
  }
  return tensor;
}

bool same(Tensor const& a, Tensor const& b) { return !std::memcmp(a.data(), b.data(), a.bytes()); }

bool any_element(std::vector<Tensor> const& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](Tensor const& t) { return t.numel > 0; });
}

Type any_type() { return pick({Type::float32, Type::float16, Type::bfloat16}); }
// Around a warp, a block, a quad's distance, a share of each thread, the two and four that `check` loads, and a chunk.
constexpr int64_t kSizes[] = {0,    1,    3,    4,    5,    8,    31,   255,  257,   1023,  1024,  1025,  2047,
                              2048, 2049, 3077, 4095, 4100, 8191, 8192, 8193, 32767, 32768, 32769, 34816, 65537};
int64_t any_numel() { return kSizes[random_bits() % std::size(kSizes)]; }

// Elements from an aligned address, for the lists of one case: none, all alike, four (aligned for quads, not for more),
// or each its own.
struct Offsets {
  int64_t kind = int64_t(random_bits() % 4);
  int64_t alike = int64_t(random_bits() % 8);

  int64_t operator()() const {
    return kind == 0 ? 0 : kind == 1 ? alike : kind == 2 ? 4 * int64_t(random_bits() % 2) : int64_t(random_bits() % 8);
  }
};

std::vector<Chunk> chunks_of(std::vector<int64_t> const& numels, std::vector<uint32_t>& first) {
  std::vector<Chunk> chunks;
  for (uint32_t t = 0; t < numels.size(); ++t) {
    first.push_back(uint32_t(chunks.size()));
    for (int64_t i = 0; i * kChunk < numels[t]; ++i) {
      chunks.push_back({t, uint32_t(i)});
    }
  }
  return chunks;
}

// One call of `check` and what it wrote.
struct Listed {
  std::vector<Tensor> x, y, out;
  std::vector<double> sum_squares;
  std::vector<float> largest;
  std::unique_ptr<bool[]> nonfinite;
  float norm = -1.0f;
  float found_inf = 0.0f;
  float scale = 1024.0f;
  int32_t growth = 0;
  std::array<float, kOutcome> outcome = {-1.0f, -1.0f, -1.0f, -1.0f};
};

struct ListCase {
  std::vector<Tensor> x, y, out;  // none of y or out: not wanted
  std::vector<bool> present;
  bool in_place = false;
  bool sums = true;
  bool reciprocal = false;
  float const* a = nullptr;
  float const* b = nullptr;
  float const* norm_scale = nullptr;
  float const* clip_norm = nullptr;
  bool updates = false;

  template <class Run>
  Listed run(Run const& backend) const {
    Listed result{x, y, out, {}, {}, {}};
    size_t const n = x.size();
    std::vector<int64_t> numels;
    for (Tensor const& tensor : x) {
      numels.push_back(tensor.numel);
    }
    std::vector<uint32_t> first;
    auto const chunks = chunks_of(numels, first);
    std::vector<ListShape> shapes(n);
    std::vector<void*> xs(n), ys(n), outs(n);
    for (size_t t = 0; t < n; ++t) {
      ListShape& shape = shapes[t];
      shape.x = shape.y = shape.out = x[t].type;
      xs[t] = present[t] ? result.x[t].data() : nullptr;
      outs[t] = in_place ? xs[t] : nullptr;
      if (!y.empty()) {
        ys[t] = result.y[t].data();
        shape.y = y[t].type;
      }
      if (!out.empty()) {
        outs[t] = result.out[t].data();
        shape.out = out[t].type;
      }
      shape.numel = numels[t];
      shape.first_chunk = first[t];
      shape.n_chunks = uint32_t((numels[t] + kChunk - 1) / kChunk);
    }
    result.sum_squares.assign(n, -1.0);
    result.largest.assign(n, -1.0f);
    result.nonfinite.reset(new bool[n]());
    std::vector<Partial> partials(chunks.size() + 1);
    backend(CheckArgs{.shapes = shapes.data(),
                      .x = xs.data(),
                      .y = y.empty() ? nullptr : ys.data(),
                      .out = in_place || !out.empty() ? outs.data() : nullptr,
                      .chunks = chunks.data(),
                      .n_tensors = int64_t(n),
                      .n_chunks = int64_t(chunks.size()),
                      .a = a,
                      .reciprocal = reciprocal,
                      .clip_norm = clip_norm,
                      .max_norm = 0.7,
                      .b = b,
                      .checked = sums,
                      .partials = sums ? partials.data() : nullptr,
                      .sums = {result.sum_squares.data(), result.largest.data(), result.nonfinite.get()},
                      .norm = &result.norm,
                      .norm_scale = norm_scale,
                      .found_inf = &result.found_inf,
                      .update = {updates ? ScaleState{.scale = &result.scale,
                                                      .growth_tracker = &result.growth,
                                                      .found_inf = &result.found_inf,
                                                      .outcome = result.outcome.data()}
                                         : ScaleState{},
                                 {.growth_factor = 2.0,
                                  .backoff_factor = 0.5,
                                  .min_scale = 1.0,
                                  .max_scale = 65536.0,
                                  .growth_interval = 1,
                                  .dynamic = true}}});
    return result;
  }
};

bool same_or_nan(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b); }

void compare(ListCase const& c, int number) {
  Listed const cpu = c.run([](CheckArgs const& args) { cpu::check(args); });
  simulator::launches = 0;
  Listed const gpu = c.run([](CheckArgs const& args) { cuda::check(args, nullptr); });
  // Nothing is launched for no chunks.
  int const expected = any_element(c.x) + c.sums;
  EXPECT(simulator::launches == expected, "case %d: %d launches", number, simulator::launches);
  for (size_t t = 0; t < c.x.size(); ++t) {
    EXPECT(same(cpu.x[t], gpu.x[t]), "case %d, tensor %zu", number, t);
    EXPECT(c.out.empty() || same(cpu.out[t], gpu.out[t]), "case %d, tensor %zu", number, t);
    EXPECT(same_or_nan(cpu.sum_squares[t], gpu.sum_squares[t]), "case %d, tensor %zu: %a, %a", number, t,
           cpu.sum_squares[t], gpu.sum_squares[t]);
    EXPECT(same_or_nan(cpu.largest[t], gpu.largest[t]), "case %d, tensor %zu: %a, %a", number, t, cpu.largest[t],
           gpu.largest[t]);
    EXPECT(cpu.nonfinite[t] == gpu.nonfinite[t], "case %d, tensor %zu", number, t);
  }
  EXPECT(same_or_nan(cpu.norm, gpu.norm), "case %d: %a, %a", number, cpu.norm, gpu.norm);
  EXPECT(cpu.found_inf == gpu.found_inf && cpu.scale == gpu.scale && cpu.outcome == gpu.outcome, "case %d", number);
  EXPECT(!(c.updates && c.sums) || gpu.scale == (gpu.outcome[0] != 0.0f ? 512.0f : 2048.0f), "case %d", number);
}

void test_lists() {
  static float const a = 0.37f, b = -1.7f, norm_scale = 1024.0f;
  for (int number = 0; number < 300; ++number) {
    ListCase c;
    bool const wants_y = chance(4);
    bool const wants_out = wants_y || chance(2);
    bool const has_nonfinite = chance(3);
    Offsets const any_offset;
    for (size_t t = random_bits() % 5; t > 0; --t) {
      int64_t const numel = any_numel();
      c.x.push_back(scattered({any_type(), numel, any_offset()}));
      if (has_nonfinite && numel && chance(2)) {
        float const infinity = std::numeric_limits<float>::infinity();
        c.x.back().set(int64_t(random_bits() % uint64_t(numel)), pick({infinity, -infinity, infinity - infinity}));
      }
      if (wants_y) {
        c.y.emplace_back(any_type(), numel, any_offset());
        c.y.back().fill(-3.0f, 3.0f);
      }
      if (wants_out) {
        c.out.emplace_back(any_type(), numel, any_offset());
        c.out.back().fill(9.0f, 9.0f);
      }
      c.present.push_back(!chance(5));
    }
    c.in_place = !wants_out && chance(2);
    c.sums = chance(4) || !(wants_out || c.in_place) || has_nonfinite;
    c.a = chance(3) ? nullptr : &a;
    c.b = wants_y ? &b : nullptr;
    c.reciprocal = c.a && chance(2);
    c.norm_scale = chance(2) ? &norm_scale : nullptr;
    c.clip_norm = !c.sums && !wants_y && chance(2) ? &a : nullptr;
    c.updates = chance(2);
    if (has_nonfinite) {  // NaNs differ in payload
      c.out.clear();
      c.y.clear();
      c.b = nullptr;
      c.in_place = false;
    }
    compare(c, number);
  }
  // More than a segment of leaves, and many tensors of one leaf.
  ListCase large;
  large.x.push_back(scattered({Type::bfloat16, 258 * kChunk + 5, 0}));
  large.present = {true};
  compare(large, 1000);
  ListCase many;
  for (int t = 0; t < 1300; ++t) {
    many.x.emplace_back(any_type(), 5, int64_t(random_bits() % 8)).fill(-3.0f, std::ldexp(1.0f, t % 40));
    many.present.push_back(true);
  }
  compare(many, 1001);
}

__global__ void sum_up(double const* sums, int64_t n, double* result) {
  double const sum = cuda::sum_list(n, [&](int64_t t) { return sums[t]; });
  if (threadIdx.x == 0) {
    *result = sum;
  }
}

// In float64: a norm is rounded to float32.
void test_list_sums() {
  double const infinity = std::numeric_limits<double>::infinity();
  for (int number = 0; number < 100; ++number) {
    std::vector<double> sums(random_bits() % 2500);
    for (double& sum : sums) {
      sum = std::fabs(double(scattered())) * (1.0 + 0x1p-40 * double(random_bits() % 1000));
    }
    if (!sums.empty() && chance(5)) {
      sums[random_bits() % sums.size()] = pick({infinity, infinity - infinity});
    }
    double const cpu = list_sum(int64_t(sums.size()), [&](int64_t t) { return sums[size_t(t)]; });
    double gpu = -1.0;
    cuda::launch(sum_up, 1, cuda::kListThreads, nullptr, sums.data(), int64_t(sums.size()), &gpu);
    EXPECT(same_or_nan(cpu, gpu), "case %d: %a, %a", number, cpu, gpu);
  }
}

// One call of `step` and what it wrote.
struct Stepped {
  std::vector<Tensor> weights, copies, states1, states2;
  std::vector<float> steps, norms;
};

struct StepCase {
  Formula formula;
  std::vector<Tensor> gradients, weights, copies, states1, states2;
  std::vector<bool> present, has_copy, adopts, scaled;
  std::vector<uint32_t> group_of;
  std::vector<Group> groups;
  std::vector<float> steps, norms, largest;
  std::vector<double> sum_squares;
  bool has_state1;
  bool narrow = false;  // whether weights may have remainders, and moments be bfloat16 or bytes
  float const* inv_scale = nullptr;
  float const* norm = nullptr;
  float const* found_inf = nullptr;
  float const* gradient_norm = nullptr;

  template <class Run>
  Stepped run(Run const& backend) const {
    Stepped r{weights, copies, states1, states2, steps, norms};
    size_t const n = weights.size();
    std::vector<int64_t> numels;
    std::vector<std::vector<float>> lamb;
    for (Tensor const& weight : weights) {
      numels.push_back(weight.numel);
      lamb.emplace_back(weight.numel);
    }
    std::vector<uint32_t> first;
    auto const chunks = chunks_of(numels, first);
    std::vector<Row> rows(n);
    std::vector<void*> taken(n);
    std::vector<GradientForm> forms(n);
    std::vector<float*> lamb_steps(n);
    std::vector<Tensor> scratch;
    bool is_narrow = false, has_adopted = false;
    for (size_t t = 0; t < n; ++t) {
      rows[t] = Row{.weight = r.weights[t].data(),
                 .state1 = has_state1 ? r.states1[t].data() : nullptr,
                 .state2 = r.states2[t].data(),
                 .copy = has_copy[t] ? r.copies[t].data() : nullptr,
                 .numel = numels[t],
                 .group = group_of[t],
                 .weight_type = weights[t].type,
                 .copy_type = copies[t].type,
                 .first_chunk = first[t],
                 .n_chunks = uint32_t((numels[t] + kChunk - 1) / kChunk),
                 .state_type = states1[t].type,
                 .adopts = adopts[t]};
      has_adopted |= adopts[t];
      is_narrow |= is_remainder(copies[t].type) || states1[t].type != Type::float32;
      taken[t] = present[t] ? gradients[t].data() : nullptr;
      forms[t] = {gradients[t].type, scaled[t]};
      lamb_steps[t] = reinterpret_cast<float*>(scratch.emplace_back(Type::float32, numels[t], 0).data());
    }
    std::unique_ptr<char, decltype(&std::free)> coefficients(
        static_cast<char*>(std::aligned_alloc(64, n * kCoefficientBytes)), &std::free);
    std::vector<Partial> partials(2 * chunks.size() + 1);
    backend(StepArgs{.formula = formula,
                     .narrow = is_narrow,
                     .adopts = has_adopted,
                     .rows = rows.data(),
                     .gradients = taken.data(),
                     .forms = forms.data(),
                     .chunks = chunks.data(),
                     .n_tensors = int64_t(n),
                     .n_chunks = int64_t(chunks.size()),
                     .groups = groups.data(),
                     .control = {inv_scale, found_inf, norm, 0.7},
                     .steps = r.steps.data(),
                     .norms = formula == Formula::novograd ? r.norms.data() : nullptr,
                     .sum_squares = sum_squares.data(),
                     .largest = largest.data(),
                     .gradient_norm = gradient_norm,
                     .lamb_steps = lamb_steps.data(),
                     .coefficients = coefficients.get(),
                     .partials = partials.data()});
    return r;
  }
};

Group any_group(Formula formula, bool has_momentum, float const* lr_on_device) {
  Group group;
  std::memset(&group, 0, sizeof group);
  group.lr = 0.01;
  group.lr_on_device = chance(3) ? lr_on_device : nullptr;
  group.maximize = chance(3);
  std::map<std::string, double> const numbers{{"beta1", 0.9},
                                              {"beta2", 0.95},
                                              {"eps", pick({0.0, 1e-8, 1e-3})},
                                              {"weight_decay", pick({0.0, 0.01})},
                                              {"momentum", has_momentum ? pick({0.0, 0.9}) : 0.0},
                                              {"dampening", pick({0.0, 0.1})},
                                              {"lr_decay", pick({0.0, 0.01})},
                                              {"max_grad_norm", pick({0.0, 1.0})}};
  with_optimizer(formula, [&](auto update) {
    HyperOf<decltype(update)>::in(group).visit([&](char const* name, auto& value) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, double>) {
        value = numbers.at(name);
      } else {
        value = chance(2);
      }
    });
  });
  return group;
}

// On a CPU no learning rate is on a device.
std::vector<Group> on_cpu(std::vector<Group> groups) {
  for (Group& group : groups) {
    if (group.lr_on_device) {
      group.lr = double(*group.lr_on_device);
      group.lr_on_device = nullptr;
    }
  }
  return groups;
}

void test_steps() {
  static float const inv_scale = 0.125f, norm = 3.0f, found = 1.0f, clean = 0.0f, lr = 0.02f;
  for (int number = 0; number < 500; ++number) {
    StepCase c;
    c.formula = Formula(number % kFormulas);
    c.narrow = number / kFormulas % 2;
    c.has_state1 = c.formula != Formula::sgd || chance(2);
    c.groups = {any_group(c.formula, c.has_state1, &lr), any_group(c.formula, c.has_state1, &lr)};
    Offsets const any_offset;
    for (size_t t = random_bits() % 6; t > 0; --t) {
      int64_t const numel = any_numel();
      c.gradients.emplace_back(any_type(), numel, any_offset()).fill(-8.0f, 8.0f);
      bool const is_split = c.narrow && chance(2);
      bool const may_be_narrow = c.narrow && (c.formula == Formula::adam || c.formula == Formula::sgd);
      Type const state = may_be_narrow ? pick({Type::float32, Type::bfloat16, Type::byte}) : Type::float32;
      // Moments in blocks are longer than their weights.
      int64_t const state_numel = state == Type::byte ? numel + blocks_of(numel) : numel;
      c.weights.emplace_back(is_split ? Type::bfloat16 : chance(3) ? any_type() : Type::float32, numel, any_offset())
          .fill(-1.0f, 1.0f);
      Type const copy = is_split ? pick({Type::remainder, Type::byte})
                                 : pick({Type::float16, Type::bfloat16, Type::float32});
      c.copies.emplace_back(copy, numel, any_offset());
      c.states1.emplace_back(state, state_numel, any_offset());
      c.states2.emplace_back(state, state_numel, any_offset());
      if (copy == Type::byte) {
        c.copies.back().no_ties();
      } else if (is_split) {
        c.copies.back().randomize();
      } else {
        c.copies.back().fill(9.0f, 9.0f);
      }
      if (state == Type::byte) {
        c.states1.back().in_blocks(numel);
        c.states2.back().in_blocks(numel);
      } else {
        c.states1.back().fill(c.formula == Formula::adagrad ? 0.0f : -1.0f, 1.0f);
        c.states2.back().fill(0.0f, 1.0f);
      }
      c.present.push_back(!chance(5));
      c.has_copy.push_back(is_split || chance(2));
      bool const is_master =
          c.weights.back().type == Type::float32 && (copy == Type::float16 || copy == Type::bfloat16);
      c.adopts.push_back(is_master && c.has_copy.back() && chance(2));
      c.scaled.push_back(chance(2));
      c.group_of.push_back(uint32_t(random_bits() % 2));
      c.steps.push_back(float(random_bits() % 4 * 100));
      c.norms.push_back(uniform(0.0f, 2.0f));
      c.sum_squares.push_back(double(uniform(0.0f, 100.0f)));
      c.largest.push_back(uniform(0.0f, 8.0f));
    }
    c.inv_scale = chance(2) ? &inv_scale : nullptr;
    c.norm = chance(2) ? &norm : nullptr;
    c.gradient_norm = chance(2) ? &norm : nullptr;
    c.found_inf = chance(2) ? nullptr : chance(3) ? &found : &clean;

    std::vector<Group> const groups_on_cpu = on_cpu(c.groups);
    Stepped const cpu = c.run([&](StepArgs args) {
      args.groups = groups_on_cpu.data();
      cpu::step(args);
    });
    simulator::launches = 0;
    Stepped const gpu = c.run([](StepArgs const& args) { cuda::step(args, nullptr); });
    int const expected = !c.weights.empty() + any_element(c.weights);
    EXPECT(c.formula == Formula::lamb ? simulator::launches <= 6 : simulator::launches == expected,
           "case %d: %d launches", number, simulator::launches);
    for (size_t t = 0; t < c.weights.size(); ++t) {
      EXPECT(same(cpu.weights[t], gpu.weights[t]), "case %d, tensor %zu", number, t);
      EXPECT(same(cpu.copies[t], gpu.copies[t]), "case %d, tensor %zu", number, t);
      EXPECT(same(cpu.states1[t], gpu.states1[t]), "case %d, tensor %zu", number, t);
      EXPECT(same(cpu.states2[t], gpu.states2[t]), "case %d, tensor %zu", number, t);
      bool const stepped = c.present[t] && c.found_inf != &found;
      EXPECT(gpu.steps[t] == c.steps[t] + float(stepped), "case %d, tensor %zu", number, t);
    }
    EXPECT(cpu.steps == gpu.steps && cpu.norms == gpu.norms, "case %d", number);
  }
}

// SGD with gradients of 1 and a rate of -1 counts how often it comes by.
void test_each_element_is_visited_once() {
  for (int64_t numel : kSizes) {
    for (int64_t offset : {0, 1, 4, 7}) {
      StepCase c{};
      c.formula = Formula::sgd;
      c.gradients.emplace_back(Type::bfloat16, numel, offset).fill(1.0f, 1.0f);
      c.weights.emplace_back(Type::float32, numel, offset).fill(0.0f, 0.0f);
      c.copies.emplace_back(Type::float16, numel, offset).fill(0.0f, 0.0f);
      c.states1.emplace_back(Type::float32, numel, 0);
      c.states2.emplace_back(Type::float32, numel, 0);
      c.present = c.has_copy = c.scaled = {true};
      c.adopts = {false};
      c.group_of = {0};
      Group group;
      std::memset(&group, 0, sizeof group);
      group.lr = -1.0;
      c.groups = {group};
      c.steps = c.norms = c.largest = {0.0f};
      c.sum_squares = {0.0};
      Stepped const gpu = c.run([](StepArgs const& args) { cuda::step(args, nullptr); });
      Tensor const ones = Tensor(Type::float32, numel, 0).fill(1.0f, 1.0f);
      EXPECT(same(gpu.weights[0], ones), "%lld elements, offset %lld", (long long)numel, (long long)offset);
    }
  }
}

// Sectors of 32 bytes that warps touched, against what their bytes fill.
void expect_whole_sectors(std::vector<std::vector<simulator::LaneAccess>> const& accesses, int64_t offset,
                          char const* what) {
  int64_t requests = 0, sectors = 0, filled = 0, bytes = 0;
  for (size_t first = 0; first < accesses.size(); first += 32) {
    for (size_t n = 0; n < accesses[first].size(); ++n) {
      std::set<uintptr_t> touched;
      int64_t bytes_of_one = 0;
      for (size_t lane = first; lane < first + 32; ++lane) {
        EXPECT(accesses[lane].size() == accesses[first].size(), "%s: the threads of a warp part", what);
        simulator::LaneAccess const access = accesses[lane].at(n);
        bytes_of_one += int64_t(access.size);
        if (access.size) {
          touched.insert(access.address / 32);
        }
      }
      ++requests;
      bytes += bytes_of_one;
      filled += (bytes_of_one + 31) / 32;
      sectors += int64_t(touched.size());
    }
  }
  // An access that begins inside of a sector may end inside of one, too.
  EXPECT(bytes > 0 && sectors <= filled + (offset ? requests : 0), "%s, offset %lld: %lld sectors, %lld would do", what,
         (long long)offset, (long long)sectors, (long long)filled);
}

void test_warps_touch_whole_sectors() {
  std::vector<std::vector<simulator::LaneAccess>> accesses;
  auto const recorded = [&](auto const& run) {
    accesses.assign(cuda::kUpdateThreads, {});
    simulator::accesses = &accesses;
    run();
    simulator::accesses = nullptr;
  };
  static float const a = 0.37f;
  for (int64_t offset = 0; offset < 8; ++offset) {
    for (Type type : {Type::float32, Type::float16, Type::bfloat16}) {
      for (int work = 0; work < 4; ++work) {
        ListCase c;
        c.x.push_back(Tensor(type, kChunk, offset).fill(-3.0f, 3.0f));
        c.present = {true};
        c.in_place = work == 1;
        if (work >= 2) {
          c.out.push_back(Tensor(any_type(), kChunk, offset).fill(9.0f, 9.0f));
        }
        if (work == 3) {
          c.y.push_back(Tensor(any_type(), kChunk, offset).fill(-3.0f, 3.0f));
          c.b = &a;
        }
        recorded([&] { c.run([](CheckArgs const& args) { cuda::check(args, nullptr); }); });
        expect_whole_sectors(accesses, offset, "check");
      }
      for (int formula = 0; formula < kFormulas; ++formula) {
        StepCase c{};
        c.formula = Formula(formula);
        c.has_state1 = true;
        c.gradients.push_back(Tensor(type, kChunk, offset).fill(-8.0f, 8.0f));
        c.weights.push_back(Tensor(Type::float32, kChunk, offset).fill(-1.0f, 1.0f));
        c.copies.push_back(Tensor(Type::float16, kChunk, offset).fill(9.0f, 9.0f));
        c.states1.push_back(Tensor(Type::float32, kChunk, offset).fill(0.0f, 1.0f));
        c.states2.push_back(Tensor(Type::float32, kChunk, offset).fill(0.0f, 1.0f));
        c.present = c.has_copy = c.scaled = {true};
        c.adopts = {false};
        c.group_of = {0};
        c.groups = {any_group(c.formula, true, nullptr)};
        c.steps = c.norms = c.largest = {1.0f};
        c.sum_squares = {1.0};
        recorded([&] { c.run([](StepArgs const& args) { cuda::step(args, nullptr); }); });
        expect_whole_sectors(accesses, offset, "step");
      }
    }
  }
}

// Sizes beyond memory, arithmetically.
void test_large_tensors() {
  int64_t const numel = (int64_t(1) << 31) + 5;
  std::vector<uint32_t> first;
  auto const chunks = chunks_of({numel}, first);
  EXPECT(chunks.size() == 65537, "%zu", chunks.size());
  int64_t elements = 0;
  for (Chunk const& chunk : chunks) {
    cuda::List const list(nullptr, Type::float32, chunk.index);
    EXPECT(reinterpret_cast<int64_t>(list.start) == 4 * elements, "chunk %u", chunk.index);
    elements += cuda::elements_of(chunk.index, numel);
  }
  EXPECT(elements == numel, "%lld", (long long)elements);
  EXPECT(cuda::elements_of(65536, numel) == 5, "the last chunk");
  cuda::List const far(nullptr, Type::float16, 0xffffffffu);
  EXPECT(reinterpret_cast<int64_t>(far.start) == 0xffffffffll * kChunk * 2, "the last chunk of all");
}

void test_scale() {
  for (int number = 0; number < 300; ++number) {
    struct State {
      float scale, found_inf, inv_used;
      float outcome[4];
      int32_t growth, hysteresis;
    };
    ScaleRule const rule{.growth_factor = 2.0,
                         .backoff_factor = 0.5,
                         .min_scale = 1.0,
                         .max_scale = 65536.0,
                         .growth_interval = 3,
                         .hysteresis = 2,
                         .dynamic = !chance(4)};
    State const before{pick({1.0f, 1.5f, 1024.0f, 65536.0f}), pick({0.0f, 1.0f, 3.0f}), 0.0f, {},
                       int32_t(random_bits() % 3), int32_t(random_bits() % 3)};
    State cpu = before, gpu = before;
    bool const hysteresis = chance(2);
    bool const latches = chance(2);
    float const used = 3.0f, loss = 0.25f;
    auto const args = [&](State& s) {
      return ScaleState{.scale = &s.scale,
                        .growth_tracker = &s.growth,
                        .found_inf = &s.found_inf,
                        .hysteresis_tracker = hysteresis ? &s.hysteresis : nullptr,
                        .inv_scale_used = latches ? &s.inv_used : nullptr,
                        .outcome = latches ? s.outcome : nullptr,
                        .scale_used = latches && hysteresis ? &used : nullptr,
                        .loss = latches && rule.dynamic ? &loss : nullptr};
    };
    cpu::update_scale({args(cpu), rule});
    cuda::update_scale({args(gpu), rule}, nullptr);
    EXPECT(!std::memcmp(&cpu, &gpu, sizeof cpu), "case %d", number);
  }
}

}  // namespace
}  // namespace amp_engine

int main() {
  amp_engine::test_large_tensors();
  amp_engine::test_each_element_is_visited_once();
  amp_engine::test_warps_touch_whole_sectors();
  amp_engine::test_scale();
  amp_engine::test_lists();
  amp_engine::test_list_sums();
  amp_engine::test_steps();
  if (amp_engine::failures) {
    std::printf("%d failures\n", amp_engine::failures);
  }
  return amp_engine::failures != 0;
}

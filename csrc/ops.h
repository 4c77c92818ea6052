// Every operation, declared once. `ops.cpp` checks the arguments, builds tables and hands them to the backend of the
// tensors' device. All raise ValueError for wrong arguments before anything is written. None waits for a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "checks.h"
#include "chunking.h"
#include "held.h"

namespace amp_engine {

// What an operation reads: of each index a tensor, or a held gradient, or nothing.
struct Inputs {
  OptionalTensors const& tensors;
  Held const* held;  // of as many rows, or null

  Inputs(OptionalTensors const& tensors, Held const* held = nullptr) : tensors(tensors), held(held) {
    TORCH_CHECK_VALUE(!held || held->size() == tensors.size(), "A list of ", tensors.size(), " tensors is beside ",
                      held ? held->size() : 0, " held gradients.");
  }
  size_t size() const { return tensors.size(); }
  bool is_held(size_t i) const { return held && held->has(i); }
  bool has(size_t i) const { return tensors[i] || is_held(i); }
  int64_t numel(size_t i) const { return is_held(i) ? held->numel(i) : tensors[i] ? tensors[i]->numel() : 0; }
  at::Device device_or(at::Device otherwise) const;
  // Refuses what the kernels cannot read, and what is on another device.
  void check(char const* op, char const* name, at::Device device) const;
};

// bool[n], float64[n], float32[n] on the device of the tensors: of the values as given.
struct Checks {
  at::Tensor nonfinite, sum_squares, largest;
};

// Defined in cuda/device_tables.cpp, or as nothing where CUDA was not built.
struct DeviceTables;  // what stays on the device between calls
bool has_cuda();
// These fill in the pointers to tables and scratch.
void run_on_device(CheckArgs& args, CheckLists const& lists, Chunking const& chunking,
                   std::shared_ptr<DeviceTables>& tables, bool is_axpby, bool is_checked, at::Device device);
void step_on_device(StepArgs& args, StepLists const& lists, std::vector<Group> const& groups, Chunking const& chunking,
                    std::shared_ptr<DeviceTables>& tables, at::Device device);
void update_scale_on_device(ScaleUpdate const& update, at::Device device);
// In order of the current stream, in a capture as well.
void copy_on_device(void* to, void const* from, size_t bytes, at::Device device);
// Whether the current stream is in a capture.
bool is_captured(at::Device device);

// See math/loss_scale.h. float32 [] but for the trackers, int32 [], and the outcome, float32 [4]; all on one device.
struct ScaleTensors {
  at::Tensor scale, growth_tracker, found_inf;
  std::optional<at::Tensor> hysteresis_tracker, inv_scale_used, outcome, scale_used, loss;
  ScaleRule rule;
};
void update_scale(ScaleTensors const& tensors);

// What a list operation does besides reading `xs`.
struct ListArguments {
  OptionalTensors const* outs = nullptr;
  OptionalTensors const* ys = nullptr;
  bool checked = true;
  std::optional<at::Tensor> a = std::nullopt, b = std::nullopt;
  bool reciprocal = false;
  std::optional<at::Tensor> clip_norm = std::nullopt;
  double max_norm = 0.0;
  std::optional<at::Tensor> found_inf = std::nullopt, norm = std::nullopt, norm_scale = std::nullopt;
  ScaleTensors const* update = nullptr;
};

// check, scale, unscale, axpby and l2norm. An object may be called again and again; on a GPU it uploads what changed.
class ListOperation {
 public:
  ListOperation();
  ~ListOperation();

  // Where outs[i] is given, outs[i] = a * xs[i] (+ b * ys[i]), computed in float32 and rounded once.
  //   xs         float16, bfloat16 or float32; an entry None takes no part, and a held gradient is only read
  //   outs, ys   as xs; of equal shapes and strides, on one device
  //   a, b       float32 []; None is 1. `reciprocal`: 1 / a instead of a
  //   clip_norm  float32 []; a is min(1, max_norm / (clip_norm + 1e-6)) instead. With `checked` false only, without ys
  //   found_inf  float32 [], set to 1 if an element of xs is not finite, else left alone
  //   norm       float32 [], the 2-norm over all xs; divided by `norm_scale` (float32 []) if given
  //   update     a loss scale that is updated last
  // With `checked` false nothing is summed or updated, and the result is empty. Bumps the versions of outs.
  Checks run(char const* op, Inputs const& xs, ListArguments const& given);

 private:
  std::vector<int64_t> numels_;
  std::unique_ptr<Chunking> chunking_;
  CheckLists lists_;
  std::vector<Partial> partials_;  // of a CPU
  std::shared_ptr<DeviceTables> device_;
};

// The steps of one optimizer: what it steps, and what it keeps, as a table that is built once.
class StepTable {
 public:
  // n tensors each; None where there is none.
  //   weights         masters (float32), or parameters (any of the types)
  //   copies          low-precision parameters that the weights are rounded into
  //   state1, state2  float32: exp_avg | momentum_buffer | sum, and exp_avg_sq
  //   groups          index of each tensor's hyperparameters
  //   steps, norms    float32 [n]: counts of steps taken; NovoGrad's norms
  //   stream_copies   whether copies are written past a CPU's caches; by itself where the step does not fit into them
  StepTable(Formula formula, OptionalTensors weights, OptionalTensors copies, OptionalTensors state1, OptionalTensors state2,
            std::vector<uint32_t> const& groups, at::Tensor steps, std::optional<at::Tensor> norms,
            std::optional<bool> stream_copies = std::nullopt);
  ~StepTable();

  // To be held around `step`, outside of where the GIL is released. Raises if another thread holds one.
  class Stepping {
   public:
    explicit Stepping(StepTable& table) : table_(table) {
      TORCH_CHECK(!table.is_stepping_, "StepTable.step: another thread is in a step of the same optimizer. Hold a lock ",
                  "around optimizer.step() where several threads call it.");
      table.is_stepping_ = true;
    }
    Stepping(Stepping const&) = delete;
    ~Stepping() { table_.is_stepping_ = false; }

   private:
    StepTable& table_;
  };

  // Whether every tensor still has the memory that the table points to.
  bool is_current() const;

  // One step of every tensor that has a gradient; of none where *found_inf != 0.
  //   gradients    any of the types; shapes and strides of the weights
  //   scaled       1 for those that are multiplied by inv_scale * min(1, max_norm / (norm + 1e-6))
  //   inv_scale, found_inf, norm, gradient_norm   float32 []
  //   sum_squares, largest   float64 [n], float32 [n] of these gradients; NovoGrad and LAMB read them once more if
  //                          these are not given
  // Bumps the versions of weights and copies; of state not, as torch's fused optimizers.
  void step(Inputs const& gradients, std::string const& scaled, std::vector<Group> const& groups,
            std::optional<at::Tensor> const& inv_scale, std::optional<at::Tensor> const& found_inf,
            std::optional<at::Tensor> const& norm, double max_norm, std::optional<at::Tensor> sum_squares,
            std::optional<at::Tensor> largest, std::optional<at::Tensor> const& gradient_norm);

  at::Device device() const { return steps_.device(); }
  Formula formula() const { return formula_; }
  size_t size() const { return lists_.rows.size(); }

 private:
  // Refuses tensors that overlap. Gradients are looked at in the first step of a table only: it takes a sort.
  void check_memory(char const* op, Inputs const* gradients) const;

  Formula formula_;
  bool narrow_ = false;
  OptionalTensors weights_, copies_, state1_, state2_;
  at::Tensor steps_;
  std::optional<at::Tensor> norms_;
  std::unique_ptr<Chunking> chunking_;
  StepLists lists_;
  at::Tensor coefficients_, lamb_scratch_;  // of a CPU, as the next two
  std::vector<Partial> partials_;
  std::vector<float*> lamb_steps_;
  ListOperation sums_;
  std::shared_ptr<DeviceTables> device_;
  bool is_stepping_ = false, was_stepped_ = false;
};

}  // namespace amp_engine

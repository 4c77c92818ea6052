// All operations. ops.cpp checks the arguments, builds the tables and calls the backend of the tensors' device. Every
// operation raises ValueError for wrong arguments before it writes anything. None waits for a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "chunking.h"

namespace amp_engine {

// Results for the unscaled values of each tensor: bool[n], float64[n] and float32[n], on the device of the tensors.
struct Checks {
  at::Tensor nonfinite, sum_squares, largest;
};

// Defined in cuda/device_tables.cpp. Without CUDA, ops.cpp has empty definitions.
struct DeviceTables;  // tables that stay on the device between calls
bool has_cuda();
// run_on_device and step_on_device set the pointers of `args` to tables and scratch.
void run_on_device(CheckArgs& args, CheckLists const& lists, Chunking const& chunking,
                   std::shared_ptr<DeviceTables>& tables, at::Device device);
void step_on_device(StepArgs& args, StepLists const& lists, std::vector<Group> const& groups, Chunking const& chunking,
                    std::shared_ptr<DeviceTables>& tables, at::Device device);
void update_scale_on_device(ScaleUpdate const& update, at::Device device);
// True if the current stream is being captured.
bool is_captured(at::Device device);

// See math/loss_scale.h. All tensors are float32 [] except the trackers, int32 [], and outcome, float32 [4]. All are on
// one device.
struct ScaleTensors {
  at::Tensor scale, growth_tracker, found_inf;
  std::optional<at::Tensor> hysteresis_tracker, inv_scale_used, outcome, scale_used, loss;
  ScaleRule rule;
};
void update_scale(ScaleTensors const& tensors);

// The arguments of a list operation besides its inputs `xs`.
struct ListArguments {
  OptionalTensors const* outs = nullptr;
  // float32 memory for outputs that `outs` lacks, or null; it is apart from all other memory of the lists
  std::vector<void*> const* memory = nullptr;
  OptionalTensors const* ys = nullptr;
  bool checked = true;
  std::optional<at::Tensor> a = std::nullopt, b = std::nullopt;
  bool reciprocal = false;
  std::optional<at::Tensor> clip_norm = std::nullopt;
  double max_norm = 0.0;
  std::optional<at::Tensor> found_inf = std::nullopt, norm = std::nullopt, norm_scale = std::nullopt;
  ScaleTensors const* update = nullptr;
  bool known = false;  // true: the lists need no check of lengths, types, devices and layouts
  bool streamed = false;  // true: a CPU writes outputs that are no inputs past its caches
};

// check, scale, copy, axpby and clip. An object may run many times; on a GPU each run uploads only what changed.
class ListOperation {
 public:
  ListOperation();
  ~ListOperation();

  // If outs[i] is given, computes outs[i] = a * xs[i] (+ b * ys[i]) in float32 and rounds once.
  //   xs         float16, bfloat16 or float32; a None entry is skipped
  //   outs, ys   types as xs; shapes and strides equal to those of xs, on one device
  //   a, b       float32 []; None is 1. `reciprocal`: 1 / a instead of a
  //   clip_norm  float32 []; a is min(1, max_norm / (clip_norm + 1e-6)) instead. Only without `checked` and without ys
  //   found_inf  float32 [], set to 1 if an element of xs is not finite, else unchanged
  //   norm       float32 [], set to the 2-norm over all xs, divided by `norm_scale` (float32 []) if given
  //   update     a loss scale that is updated last
  // If `checked` is false, nothing is summed or updated, and the result is empty. Bumps the versions of outs.
  Checks run(char const* op, OptionalTensors const& xs, ListArguments const& given);

 private:
  std::vector<int64_t> numels_;
  std::unique_ptr<Chunking> chunking_;
  CheckLists lists_;
  std::vector<Partial> partials_;  // only used on a CPU
  std::shared_ptr<DeviceTables> device_;
};

// Steps the tensors of one optimizer. The table of their addresses is built once.
class StepTable {
 public:
  // Each list has n entries. An entry is None if there is no such tensor.
  //   weights         masters (float32), or parameters (float32, float16 or bfloat16)
  //   copies          low-precision parameters that the weights are rounded into; remainders of bfloat16 weights: int16,
  //                   or uint8, the upper half of these
  //   state1, state2  float32, for Adam and SGD also bfloat16, or uint8 of math/blocks.h: exp_avg | momentum_buffer |
  //                   sum, and exp_avg_sq
  //   groups          for each tensor, the index of its group of hyperparameters
  //   steps, norms    float32 [n]: numbers of steps taken; norms of NovoGrad
  //   adopts          true: elements of a copy that are not the float32 weight rounded replace those of the weight
  //   stream_copies   true: a CPU writes copies past its caches. Default: true if the step does not fit into them
  StepTable(Formula formula, OptionalTensors weights, OptionalTensors copies, OptionalTensors state1, OptionalTensors state2,
            std::vector<uint32_t> const& groups, at::Tensor steps, std::optional<at::Tensor> norms, bool adopts = false,
            std::optional<bool> stream_copies = std::nullopt);
  ~StepTable();

  // Hold this around `step`, and around the release of the GIL for it. Raises if another thread holds one.
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

  // True if every tensor still has the memory, type and layout that the table was built for.
  bool is_current() const;

  // Steps every tensor that has a gradient. If *found_inf != 0, steps none.
  //   gradients    float32, float16 or bfloat16; shapes and strides of the weights
  //   scaled       for each tensor, 1 if its gradient is multiplied by inv_scale * min(1, max_norm / (norm + 1e-6))
  //   inv_scale, found_inf, norm, gradient_norm   float32 []
  //   sum_squares, largest   float64 [n], float32 [n] of these gradients. If they are missing, NovoGrad and LAMB read
  //                          the gradients once more to compute them
  // Bumps the versions of weights and copies, but not of state, like torch's fused optimizers.
  void step(OptionalTensors const& gradients, std::string const& scaled, std::vector<Group> const& groups,
            std::optional<at::Tensor> const& inv_scale, std::optional<at::Tensor> const& found_inf,
            std::optional<at::Tensor> const& norm, double max_norm, std::optional<at::Tensor> sum_squares,
            std::optional<at::Tensor> largest, std::optional<at::Tensor> const& gradient_norm);

  at::Device device() const { return steps_.device(); }
  Formula formula() const { return formula_; }
  size_t size() const { return lists_.rows.size(); }

 private:
  // Refuses tensors that overlap. Only the first step of a table checks its gradients, because this takes a sort.
  void check_memory(char const* op, OptionalTensors const* gradients) const;

  Formula formula_;
  bool narrow_ = false, adopts_ = false;
  OptionalTensors weights_, copies_, state1_, state2_;
  at::Tensor steps_;
  std::optional<at::Tensor> norms_;
  std::unique_ptr<Chunking> chunking_;
  StepLists lists_;
  at::Tensor coefficients_, lamb_scratch_;  // this line and the next two: only used on a CPU
  std::vector<Partial> partials_;
  std::vector<float*> lamb_steps_;
  ListOperation sums_;
  std::shared_ptr<DeviceTables> device_;
  bool is_stepping_ = false, was_stepped_ = false;
};

}  // namespace amp_engine

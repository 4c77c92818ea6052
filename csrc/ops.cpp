#include "ops.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace amp_engine {
namespace {

void check_device(char const* op, at::Device device) {
  TORCH_CHECK_VALUE(device.is_cpu() || (has_cuda() && device.is_cuda()), op, ": the tensors are on ", device,
                    ", but this build of amp_engine._C computes on ", has_cuda() ? "CPUs and CUDA GPUs." : "CPUs only.");
}

// The address of empty tensors, which have none of their own but take part: their steps are counted. Never read.
char const kEmpty = 0;

// Reading must not materialize copy-on-write memory, so only tensors that are written ask for mutable_data_ptr.
Entry read(std::optional<at::Tensor> const& t) {
  if (!t) {
    return {nullptr, Type::float32};
  }
  void const* const data = t->numel() > 0 ? t->const_data_ptr() : &kEmpty;
  return {const_cast<void*>(data), type_of(*t)};
}

Entry written(std::optional<at::Tensor> const& t) {
  return t ? Entry{t->mutable_data_ptr(), type_of(*t)} : Entry{nullptr, Type::float32};
}

template <class T>
T const* pointer(std::optional<at::Tensor> const& t) {
  return t ? t->const_data_ptr<T>() : nullptr;
}

template <class T>
T* mutable_pointer(std::optional<at::Tensor> const& t) {
  return t ? t->mutable_data_ptr<T>() : nullptr;
}

void bump_versions(OptionalTensors const& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ask_ahead(tensors, i, ask_for_pointers, ask_for_version);
    if (tensors[i] && tensors[i]->unsafeGetTensorImpl()->version_counter().enabled()) {  // those of inference have none
      tensors[i]->unsafeGetTensorImpl()->bump_version();
    }
  }
}

void check(char const* op, ScaleTensors const& tensors, at::Device device) {
  check_scalar(op, "scale", tensors.scale, at::kFloat, device);
  check_scalar(op, "growth_tracker", tensors.growth_tracker, at::kInt, device);
  check_scalar(op, "hysteresis_tracker", tensors.hysteresis_tracker, at::kInt, device);
  check_scalar(op, "found_inf", tensors.found_inf, at::kFloat, device);
  check_scalar(op, "inv_scale_used", tensors.inv_scale_used, at::kFloat, device);
  check_vector(op, "outcome", tensors.outcome, kOutcome, at::kFloat, device);
  check_scalar(op, "scale_used", tensors.scale_used, at::kFloat, device);
  check_scalar(op, "loss", tensors.loss, at::kFloat, device);
}

ScaleUpdate pointers(ScaleTensors const& tensors) {
  return {{tensors.scale.mutable_data_ptr<float>(), tensors.growth_tracker.mutable_data_ptr<int32_t>(),
           tensors.found_inf.mutable_data_ptr<float>(), mutable_pointer<int32_t>(tensors.hysteresis_tracker),
           mutable_pointer<float>(tensors.inv_scale_used), mutable_pointer<float>(tensors.outcome),
           pointer<float>(tensors.scale_used), pointer<float>(tensors.loss)},
          tensors.rule};
}

OptionalTensors written(ScaleTensors const& tensors) {
  return {tensors.scale,          tensors.growth_tracker, tensors.hysteresis_tracker,
          tensors.inv_scale_used, tensors.outcome,        tensors.found_inf};
}

at::Tensor scratch(int64_t bytes) { return at::empty({bytes}, at::TensorOptions().dtype(at::kByte)); }

at::Device device_of(OptionalTensors const& tensors, at::Device otherwise) {
  auto const first = std::find_if(tensors.begin(), tensors.end(), [](auto const& t) { return t.has_value(); });
  return first == tensors.end() ? otherwise : (*first)->device();
}

// At least `n` partials, with the values of earlier calls.
Partial* partials_in(std::vector<Partial>& memory, int64_t n) {
  memory.resize(std::max<size_t>({memory.size(), size_t(n), 1}));
  return memory.data();
}

}  // namespace

#ifndef AMP_WITH_CUDA
struct DeviceTables {};
bool has_cuda() { return false; }
#endif

ListOperation::ListOperation() = default;
ListOperation::~ListOperation() = default;

Checks ListOperation::run(char const* op, OptionalTensors const& xs, ListArguments const& given) {
  OptionalTensors const *const outs = given.outs, *const ys = given.ys;
  at::Device const device = device_of(xs, given.found_inf ? given.found_inf->device() : at::Device(at::kCPU));
  check_device(op, device);
  if (!given.known) {
    Named const x_list{op, "xs", xs};
    check_tensors(x_list, device);
    if (outs) {
      Named const out_list{op, "outputs", *outs};
      check_length(out_list, xs.size(), "xs");
      check_tensors(out_list, device);
      check_same_layout(out_list, x_list);
    }
    if (ys) {
      Named const y_list{op, "ys", *ys};
      check_length(y_list, xs.size(), "xs");
      check_tensors(y_list, device);
      check_same_layout(y_list, x_list);
    }
  }
  if (outs) {
    Memory memory;
    memory.written({op, "outputs", *outs});
    memory.read({op, "xs", xs}, *outs);
    if (ys) {
      memory.read({op, "ys", *ys}, *outs);
    }
    memory.check();
  }
  check_scalar(op, "a", given.a, at::kFloat, device);
  check_scalar(op, "b", given.b, at::kFloat, device);
  check_scalar(op, "norm", given.clip_norm, at::kFloat, device);
  check_scalar(op, "found_inf", given.found_inf, at::kFloat, device);
  check_scalar(op, "norm", given.norm, at::kFloat, device);
  check_scalar(op, "norm_scale", given.norm_scale, at::kFloat, device);
  if (given.update) {
    check(op, *given.update, device);
  }

  int64_t const n = int64_t(xs.size());
  bool const writes = outs || given.memory;
  if (int64_t(numels_.size()) != n) {
    chunking_.reset();
  }
  numels_.resize(n);
  lists_.shapes.resize(n);
  lists_.x.resize(n);
  lists_.y.resize(ys ? n : 0);
  lists_.out.resize(writes ? n : 0);
  for (int64_t t = 0; t < n; ++t) {
    ask_ahead_for_memory(xs, size_t(t));
    ListShape& shape = lists_.shapes[t];
    int64_t const numel = xs[t] ? xs[t]->numel() : 0;
    if (numel != numels_[t]) {
      chunking_.reset();  // before an address is asked for, which may raise
      numels_[t] = numel;
    }
    Entry const x = read(xs[t]);
    shape.x = x.type;
    lists_.x[t] = x.data;
    if (ys) {
      Entry const y = read((*ys)[t]);
      shape.y = y.type;
      lists_.y[t] = y.data;
    }
    if (writes) {
      void* const memory = given.memory ? (*given.memory)[t] : nullptr;
      Entry const out = memory ? Entry{memory, Type::float32} : written(outs ? (*outs)[t] : std::nullopt);
      shape.out = out.type;
      lists_.out[t] = out.data;
    }
  }
  if (!chunking_) {
    chunking_ = std::make_unique<Chunking>(numels_);
    for (int64_t t = 0; t < n; ++t) {
      lists_.shapes[t].numel = numels_[t];
      lists_.shapes[t].first_chunk = chunking_->first_chunk[t];
      lists_.shapes[t].n_chunks = uint32_t(chunks_of(numels_[t]));
    }
  }

  Checks result;
  CheckArgs args{};
  args.n_tensors = n;
  args.n_chunks = int64_t(chunking_->chunks.size());
  args.a = pointer<float>(given.a);
  args.reciprocal = given.reciprocal;
  args.clip_norm = pointer<float>(given.clip_norm);
  args.max_norm = given.max_norm;
  args.b = pointer<float>(given.b);
  args.checked = given.checked;
  args.streamed = given.streamed;
  if (given.checked) {
    auto const options = at::TensorOptions().device(device);
    result = {at::empty({n}, options.dtype(at::kBool)), at::empty({n}, options.dtype(at::kDouble)),
              at::empty({n}, options.dtype(at::kFloat))};
    args.sums = {result.sum_squares.mutable_data_ptr<double>(), result.largest.mutable_data_ptr<float>(),
                 result.nonfinite.mutable_data_ptr<bool>()};
    args.norm = mutable_pointer<float>(given.norm);
    args.norm_scale = pointer<float>(given.norm_scale);
    args.found_inf = mutable_pointer<float>(given.found_inf);
    if (given.update) {
      args.update = pointers(*given.update);
    }
  }
  if (device.is_cpu()) {
    args.shapes = lists_.shapes.data();
    args.x = lists_.x.data();
    args.y = ys ? lists_.y.data() : nullptr;
    args.out = writes ? lists_.out.data() : nullptr;
    args.chunks = chunking_->chunks.data();
    args.partials = given.checked ? partials_in(partials_, args.n_chunks) : nullptr;
    cpu::check(args);
  } else {
    run_on_device(args, lists_, *chunking_, device_, device);
  }
  if (outs) {
    bump_versions(*outs);
  }
  if (given.update) {
    bump_versions(written(*given.update));
  }
  return result;
}

void update_scale(ScaleTensors const& tensors) {
  at::Device const device = tensors.scale.device();
  check_device("update_scale_", device);
  check("update_scale_", tensors, device);
  if (device.is_cpu()) {
    cpu::update_scale(pointers(tensors));
  } else {
    update_scale_on_device(pointers(tensors), device);
  }
  bump_versions(written(tensors));
}

bool in_blocks(at::Tensor const& moment, at::Tensor const& weight) {
  int64_t const n = weight.numel();
  return moment.scalar_type() == at::kByte && moment.dim() == 1 && moment.numel() == n + blocks_of(n);
}

void check_moments(Named const& list, Named const& weights) {
  for_each(list.tensors, [&](size_t i, at::Tensor const& t) {
    auto const& weight = weights.tensors[i];
    bool const is_byte = t.scalar_type() == at::kByte;
    TORCH_CHECK_VALUE(!weight || (is_byte ? in_blocks(t, *weight) : same_layout(t, *weight)), list.at(i), " is ",
                      text(t), ", but ", weights.name, "[", i, "] is ", weight ? text(*weight) : "",
                      is_byte ? ".  Its codes and the exponents of its blocks must be one flat tensor."
                              : ".  Shapes and strides must be equal.");
  });
}

// SGD without momentum has no buffer.
template <class Update>
bool reads_state1(Group const& group) {
  if constexpr (requires(typename Update::Hyper const& hyper) { hyper.has_state1(); }) {
    return HyperOf<Update>::in(group).has_state1();
  } else {
    return Update::kState1;
  }
}

StepTable::StepTable(Formula formula, OptionalTensors weights, OptionalTensors copies, OptionalTensors state1,
                     OptionalTensors state2, std::vector<uint32_t> const& groups, at::Tensor steps,
                     std::optional<at::Tensor> norms, bool adopts, std::optional<bool> stream_copies)
    : formula_(formula),
      weights_(std::move(weights)),
      copies_(std::move(copies)),
      state1_(std::move(state1)),
      state2_(std::move(state2)),
      steps_(std::move(steps)),
      norms_(std::move(norms)) {
  char const* const op = "StepTable";
  size_t const n = weights_.size();
  at::Device const device = steps_.device();
  check_device(op, device);
  Named const weight_list{op, "weights", weights_}, copy_list{op, "copies", copies_}, list1{op, "state1", state1_},
      list2{op, "state2", state2_};
  for (Named const* list : {&copy_list, &list1, &list2}) {
    check_length(*list, n, "weights");
  }
  TORCH_CHECK_VALUE(groups.size() == n, op, ": groups has ", groups.size(), " entries, but weights has ", n, ".");
  check_tensors(weight_list, device);
  check_tensors(copy_list, device, Allowed::floats_or_remainders);
  bool const narrow_state = with_optimizer(formula, [](auto update) { return kNarrowState<decltype(update)>; });
  check_tensors(list1, device, narrow_state ? Allowed::moments : Allowed::float32);
  check_tensors(list2, device, narrow_state ? Allowed::moments : Allowed::float32);
  for (size_t t = 0; t < n; ++t) {
    bool const is_split = copies_[t] && is_remainder(type_of(*copies_[t]));
    TORCH_CHECK_VALUE(!is_split || !weights_[t] || weights_[t]->scalar_type() == at::kBFloat16, copy_list.at(t),
                      " is a remainder, which only bfloat16 weights have, but ", weight_list.at(t), " is ",
                      weights_[t] ? text(*weights_[t]) : "", ".");
    TORCH_CHECK_VALUE(!state1_[t] || !state2_[t] || state1_[t]->scalar_type() == state2_[t]->scalar_type(), list1.at(t),
                      " is ", state1_[t] ? text(*state1_[t]) : "", ", and ", list2.at(t), " is ",
                      state2_[t] ? text(*state2_[t]) : "", ", but both moments must have one type.");
  }
  check_same_layout(copy_list, weight_list);
  for (Named const* list : {&list1, &list2}) {
    check_moments(*list, weight_list);
  }
  check_vector(op, "steps", steps_, int64_t(n), at::kFloat, device);
  check_vector(op, "norms", norms_, int64_t(n), at::kFloat, device);
  bool const keeps_norms = with_optimizer(formula, [](auto update) { return decltype(update)::kNorm; });
  TORCH_CHECK_VALUE(!keeps_norms || norms_, op, ": novograd keeps norms; pass a float32 tensor of shape [", n,
                    "].");
  check_memory(op, nullptr);

  std::vector<int64_t> numels(n);
  for (size_t t = 0; t < n; ++t) {
    numels[t] = weights_[t] ? weights_[t]->numel() : 0;
  }
  chunking_ = std::make_unique<Chunking>(numels);
  lists_.rows.resize(n);
  lists_.gradients.resize(n);
  lists_.forms.resize(n);
  int64_t bytes = 0;
  for (OptionalTensors const* list : {&weights_, &copies_, &state1_, &state2_}) {
    for (auto const& t : *list) {
      bytes += t ? int64_t(t->nbytes()) : 0;
    }
  }
  bool const streamed = device.is_cpu() && stream_copies.value_or(cpu::outgrows_caches(bytes));
  for (size_t t = 0; t < n; ++t) {
    Entry const weight = written(weights_[t]), copy = written(copies_[t]);
    Entry const state1 = written(state1_[t]), state2 = written(state2_[t]);
    Row& row = lists_.rows[t];
    row = Row{weight.data,
              state1.data,
              state2.data,
              copy.data,
              numels[t],
              groups[t],
              weight.type,
              copy.type,
              chunking_->first_chunk[t],
              uint32_t(chunks_of(numels[t])),
              state1.type,
              streamed,
              adopts && weight.type == Type::float32 && copy.data && copy.type != Type::float32};
    narrow_ |= is_remainder(row.copy_type) || row.state_type != Type::float32;
    adopts_ |= row.adopts;
  }
  if (device.is_cpu()) {
    coefficients_ = scratch(std::max<int64_t>(int64_t(n), 1) * kCoefficientBytes);
  }
}

StepTable::~StepTable() = default;

void StepTable::check_memory(char const* op, OptionalTensors const* gradients) const {
  OptionalTensors const counts{steps_}, norms{norms_};
  Memory memory;
  memory.written({op, "weights", weights_});
  memory.written({op, "copies", copies_});
  memory.written({op, "state1", state1_});
  memory.written({op, "state2", state2_});
  memory.written({op, "steps", counts});
  memory.written({op, "norms", norms});
  if (gradients) {
    memory.read({op, "gradients", *gradients}, weights_);
  }
  memory.check();
}

bool StepTable::is_current() const {
  auto const same = [](std::optional<at::Tensor> const& t, void const* address, Type type) {
    return t ? t->const_data_ptr() == address && type_of(*t) == type && !is_lazy(*t) : address == nullptr;
  };
  // A weight that was transposed in place has the same address as before.
  auto const laid_out_alike = [](std::optional<at::Tensor> const& a, std::optional<at::Tensor> const& b) {
    return !a || !b || same_layout(*a, *b) || in_blocks(*b, *a);
  };
  for (size_t t = 0; t < lists_.rows.size(); ++t) {
    for (OptionalTensors const* list : {&weights_, &copies_, &state1_, &state2_}) {
      ask_ahead_for_memory(*list, t);
    }
    Row const& row = lists_.rows[t];
    if (!same(weights_[t], row.weight, row.weight_type) || !same(state1_[t], row.state1, row.state_type) ||
        !same(state2_[t], row.state2, row.state_type) || !same(copies_[t], row.copy, row.copy_type) ||
        (weights_[t] && weights_[t]->numel() != row.numel) || !laid_out_alike(weights_[t], state1_[t]) ||
        !laid_out_alike(weights_[t], copies_[t])) {
      return false;
    }
  }
  return true;
}

void StepTable::step(OptionalTensors const& gradients, std::string const& scaled,
                     std::vector<Group> const& groups, std::optional<at::Tensor> const& inv_scale,
                     std::optional<at::Tensor> const& found_inf, std::optional<at::Tensor> const& norm, double max_norm,
                     std::optional<at::Tensor> sum_squares, std::optional<at::Tensor> largest,
                     std::optional<at::Tensor> const& gradient_norm) {
  char const* const op = "StepTable.step";
  size_t const n = lists_.rows.size();
  at::Device const device = steps_.device();
  Named const list{op, "gradients", gradients};
  check_length(list, n, "weights");
  TORCH_CHECK_VALUE(scaled.size() == n, op, ": scaled has ", scaled.size(), " entries, but weights has ", n, ".");
  check_scalar(op, "inv_scale", inv_scale, at::kFloat, device);
  check_scalar(op, "found_inf", found_inf, at::kFloat, device);
  check_scalar(op, "norm", norm, at::kFloat, device);
  check_scalar(op, "gradient_norm", gradient_norm, at::kFloat, device);
  check_vector(op, "sum_squares", sum_squares, int64_t(n), at::kDouble, device);
  check_vector(op, "largest", largest, int64_t(n), at::kFloat, device);
  bool const needs_state2 = with_optimizer(formula_, [](auto update) { return decltype(update)::kState2; });
  std::vector<bool> needs_state1;
  for (Group const& group : groups) {
    needs_state1.push_back(with_optimizer(formula_, [&](auto update) { return reads_state1<decltype(update)>(group); }));
  }
  Named const weight_list{op, "weights", weights_};
  for (size_t t = 0; t < n; ++t) {
    ask_ahead(gradients, t);
    ask_ahead(weights_, t);
    uint32_t const group = lists_.rows[t].group;
    TORCH_CHECK_VALUE(group < groups.size(), op, ": weights[", t, "] is in group ", group, " of ", groups.size(), ".");
    if (gradients[t]) {
      TORCH_CHECK_VALUE(weights_[t].has_value(), op, ": gradients[", t, "] is given, but weights[", t, "] is None.");
      check_tensor(list, t, device, Allowed::floats);
      check_same_layout(list, weight_list, t);
      TORCH_CHECK_VALUE((!needs_state1[group] || state1_[t]) && (!needs_state2 || state2_[t]), op, ": weights[", t,
                        "] has a gradient, but no optimizer state.");
    }
    Entry const gradient = read(gradients[t]);
    lists_.gradients[t] = gradient.data;
    lists_.forms[t] = {gradient.type, scaled[t] == 1};
  }
  if (!was_stepped_) {
    check_memory(op, &gradients);
    was_stepped_ = true;
  }
  bool const needs_sums = norms_ || formula_ == Formula::lamb;
  if (needs_sums && !(sum_squares && largest)) {
    Checks const checks = sums_.run(op, gradients, {});
    sum_squares = checks.sum_squares;
    largest = checks.largest;
  }

  StepArgs args{};
  args.formula = formula_;
  args.narrow = narrow_;
  args.adopts = adopts_;
  args.n_tensors = int64_t(n);
  args.n_chunks = int64_t(chunking_->chunks.size());
  args.control = {pointer<float>(inv_scale), pointer<float>(found_inf), pointer<float>(norm), max_norm};
  args.steps = steps_.mutable_data_ptr<float>();
  args.norms = mutable_pointer<float>(norms_);
  args.sum_squares = pointer<double>(sum_squares);
  args.largest = pointer<float>(largest);
  args.gradient_norm = pointer<float>(gradient_norm);
  if (device.is_cpu()) {
    if (formula_ == Formula::lamb && lamb_steps_.size() < n) {
      std::vector<int64_t> const begin = lamb_offsets(lists_.rows);
      lamb_scratch_ = scratch(begin[n] * int64_t(sizeof(float)));
      for (size_t t = 0; t < n; ++t) {
        lamb_steps_.push_back(static_cast<float*>(lamb_scratch_.mutable_data_ptr()) + begin[t]);
      }
    }
    args.rows = lists_.rows.data();
    args.gradients = lists_.gradients.data();
    args.forms = lists_.forms.data();
    args.chunks = chunking_->chunks.data();
    args.groups = groups.data();
    args.lamb_steps = lamb_steps_.data();
    args.coefficients = coefficients_.mutable_data_ptr();
    args.partials = formula_ == Formula::lamb ? partials_in(partials_, 2 * args.n_chunks) : nullptr;
    cpu::step(args);
  } else {
    step_on_device(args, lists_, groups, *chunking_, device_, device);
  }
  bump_versions(weights_);
  bump_versions(copies_);
}

#ifndef AMP_WITH_CUDA
void run_on_device(CheckArgs&, CheckLists const&, Chunking const&, std::shared_ptr<DeviceTables>&, at::Device) {}
void step_on_device(StepArgs&, StepLists const&, std::vector<Group> const&, Chunking const&,
                    std::shared_ptr<DeviceTables>&, at::Device) {}
void update_scale_on_device(ScaleUpdate const&, at::Device) {}
bool is_captured(at::Device) { return false; }
#endif

}  // namespace amp_engine

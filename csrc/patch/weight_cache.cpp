#include "weight_cache.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COW.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cast.h"
#include "storage.h"
#include "tensor_lists.h"

namespace py = pybind11;

namespace amp_engine::patch {
namespace {

py::object wrap(at::Tensor const& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

// Nodes are held by std::shared_ptr before torch 2.13, and by c10::intrusive_ptr since.
template <class Pointer, class Node>
Pointer make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Node>();
  } else {
    return c10::make_intrusive<Node>();
  }
}

// Returns an alias of `copy` with the autograd node of weight.to(low).
at::Tensor connect(at::Tensor const& copy, at::Tensor const& weight) {
  using namespace torch::autograd;
  using ToCopy = generated::ToCopyBackward0;
  at::Tensor alias = copy.detach();
  auto node = make_node<decltype(Edge::function), ToCopy>();
  static_cast<ToCopy&>(*node).self_options = weight.options();
  node->set_next_edges(collect_next_edges(weight));
  set_history(alias, node);
  return alias;
}

at::Tensor copied(at::Tensor const& weight, at::ScalarType low, at::Tensor memory) {
  std::optional<py::gil_scoped_release> no_gil;
  if (!weight.is_cuda()) {  // on a GPU it is only a launch
    no_gil.emplace();
  }
  c10::NoGradGuard const no_grad;
  return memory.defined() ? memory.copy_(weight) : patch::cast(weight, low);
}

}  // namespace

PyObject* WeightCache::find(at::Tensor const& weight, at::ScalarType low) {
  auto const found = entries_.find(weight.unsafeGetTensorImpl());
  if (found == entries_.end() || !is_current(found->second, weight, low)) {
    return nullptr;
  }
  bool const connected = c10::GradMode::is_enabled() && weight.requires_grad();
  return Py_XNewRef((connected ? found->second.connected : found->second.plain).object.ptr());
}

WeightCache::Cast WeightCache::cast(at::Tensor weight, at::ScalarType low) {
  auto found = entries_.find(weight.unsafeGetTensorImpl());
  bool const keeps = c10::GradMode::is_enabled();
  bool const connected = keeps && weight.requires_grad();
  bool const is_current = found != entries_.end() && WeightCache::is_current(found->second, weight, low);
  if (!is_current && !keeps) {  // the copy would hold memory through evaluation
    return {wrap(copied(weight, low, {})), true};
  }
  if (is_current) {
    Entry const& entry = found->second;
    if (py::object const& kept = (connected ? entry.connected : entry.plain).object) {
      return {kept, false};
    }
  }
  at::Tensor const copy = is_current ? found->second.copy : renew(weight, low);
  Alias made = alias(connected ? connect(copy, weight) : copy.detach());
  py::object const result = made.object;
  Alias replaced;
  found = entries_.find(weight.unsafeGetTensorImpl());
  if (found != entries_.end() && found->second.copy.is_same(copy)) {
    replaced = std::exchange(connected ? found->second.connected : found->second.plain, std::move(made));
  }
  return {result, !is_current};
}

void WeightCache::after_backward() {
  ++changes_;
  // Freeing these may run Python that calls this class.
  std::vector<Entry> discarded;
  std::vector<Alias> aliases;
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    // A copy that no step has written yet is kept for the step that may follow now.
    if ((entry.stepped || entry.state == State::current) && !entry.weight.expired()) {
      aliases.push_back(std::move(entry.connected));
      aliases.push_back(std::move(entry.plain));
      // A step that is writing the copy now does not know of writes in the meantime.
      bool const stays = entry.state != State::wrong && entry.writer != Writer::step;
      entry.state = stays ? State::outdated : State::wrong;
      ++it;
    } else {
      discarded.push_back(std::move(entry));
      it = entries_.erase(it);
    }
  }
}

void WeightCache::discard_orphans() {
  std::vector<Alias> edges;
  std::vector<at::Tensor> held;
  for (auto& item : entries_) {
    Entry& entry = item.second;
    if (!entry.connected.object) {
      continue;
    }
    held.emplace_back(entry.weight.lock());
    // One reference is ours, and one is the tensor's, which holds its object as long as other C++ code holds the
    // tensor.
    if (py::object const object = wrap(held.back()); Py_REFCNT(object.ptr()) == 2) {
      edges.push_back(std::move(entry.connected));
    }
  }
  edges.clear();
  held.clear();
  sweep();
}

size_t WeightCache::size() const {
  return size_t(std::count_if(entries_.begin(), entries_.end(),
                              [](auto const& item) { return item.second.state == State::current; }));
}

void WeightCache::clear() {
  ++changes_;
  auto const discarded = std::exchange(entries_, {});
}

WeightCache::Handed WeightCache::copies(std::vector<at::Tensor> const& weights, uint64_t unfinished) {
  ++changes_;
  Handed handed{++steps_, {}};
  handed.copies.reserve(weights.size());
  for (at::Tensor const& weight : weights) {
    handed.copies.emplace_back();
    discard_aliases(weight);
    auto found = entries_.find(weight.unsafeGetTensorImpl());
    if (found == entries_.end()) {
      continue;
    }
    if (found->second.is_left) {  // never changes, because a graph's step and an eager one share a table
      if (found->second.copy.defined()) {
        handed.copies.back() = found->second.copy;
      }
      continue;
    }
    if (found->second.writer == Writer::step) {
      found->second.state = State::wrong;
      if (found->second.step != unfinished) {  // two steps write the weight at once: neither knows the result
        continue;
      }
      found->second.writer = Writer::none;
    }
    Entry& entry = found->second;
    entry.stepped = true;
    bool const is_good = entry.state != State::wrong && entry.writer == Writer::none &&
                         entry.copy.storage().use_count() == 1 && is_exact(entry, weight);
    at::Tensor const copy = is_good ? entry.copy : renew(weight, entry.copy.scalar_type());
    found = entries_.find(weight.unsafeGetTensorImpl());
    if (found == entries_.end()) {
      continue;
    }
    if (found->second.copy.is_same(copy) && found->second.writer == Writer::none) {
      found->second.writer = Writer::step;
      found->second.step = handed.step;
      handed.copies.back() = copy;
    } else {  // another thread has taken or replaced the copy
      found->second.state = State::wrong;
    }
  }
  return handed;
}

void WeightCache::written(std::vector<at::Tensor> const& weights, uint64_t step) {
  ++changes_;
  for (at::Tensor const& weight : weights) {
    auto const found = entries_.find(weight.unsafeGetTensorImpl());
    if (found == entries_.end()) {
      continue;
    }
    Entry& entry = found->second;
    bool const is_ours = entry.writer == Writer::step && entry.step == step;
    // Otherwise another thread has made this copy, or may have written the weight in the meantime.
    if (is_ours && entry.state != State::wrong && is_sole(weight) && is_watched(storage_of(weight))) {
      entry.copy.unsafeGetTensorImpl()->bump_version();
      mark(entry, weight);
      entry.state = State::current;
    } else {
      entry.state = State::wrong;
    }
    if (is_ours) {
      entry.writer = Writer::none;
    }
  }
}

void WeightCache::leave(std::vector<at::Tensor> const& weights) {
  ++changes_;
  for (at::Tensor const& weight : weights) {
    discard_aliases(weight);
    auto found = entries_.find(weight.unsafeGetTensorImpl());
    if (found == entries_.end()) {
      found = entries_.emplace(weight.unsafeGetTensorImpl(), Entry{WeakImpl(weight.getIntrusivePtr())}).first;
    }
    found->second.state = State::wrong;
    found->second.stepped = found->second.is_left = true;
  }
}

bool WeightCache::is_current(Entry const& entry, at::Tensor const& weight, at::ScalarType low) {
  return entry.state == State::current && entry.copy.scalar_type() == low && is_exact(entry, weight);
}

bool WeightCache::is_exact(Entry const& entry, at::Tensor const& weight) {
  return entry.version == version_of(weight) && entry.address == weight.const_data_ptr() &&
         entry.copy_version == version_of(entry.copy) && is_sole(weight) && is_watched(storage_of(weight));
}

void WeightCache::mark(Entry& entry, at::Tensor const& weight) {
  entry.version = version_of(weight);
  entry.copy_version = version_of(entry.copy);
  entry.address = weight.const_data_ptr();
}

void WeightCache::discard_aliases(at::Tensor const& weight) {
  std::pair<Alias, Alias> discarded;
  auto const found = entries_.find(weight.unsafeGetTensorImpl());
  if (found != entries_.end()) {
    discarded = {std::move(found->second.connected), std::move(found->second.plain)};
  }
}

WeightCache::Alias WeightCache::alias(at::Tensor tensor) {
  py::object object = wrap(tensor);
  return {std::move(object), std::move(tensor)};
}

// Reuses the copy's memory if nothing else holds it, because a step's table points there. Keeps the copy only if
// writes will be detected.
at::Tensor WeightCache::renew(at::Tensor const& weight, at::ScalarType low) {
  c10::InferenceMode const off(false);
  Impl* const key = weight.unsafeGetTensorImpl();
  discard_aliases(weight);
  auto found = entries_.find(key);
  if (found != entries_.end() && found->second.is_left) {
    return copied(weight, low, {});
  }
  uint64_t const changes = changes_;
  uint32_t const version = version_of(weight);
  void const* const address = weight.const_data_ptr();
  if (!watch(weight)) {
    std::optional<Entry> discarded;
    if (found != entries_.end()) {
      discarded = std::move(found->second);
      entries_.erase(found);
    }
    return copied(weight, low, {});
  }
  at::Tensor memory;
  if (found != entries_.end()) {
    Entry& entry = found->second;
    if (entry.stepped && entry.writer == Writer::none && entry.copy.storage().use_count() == 1 &&
        entry.copy.scalar_type() == low && entry.copy.sizes() == weight.sizes() &&
        entry.copy.strides() == weight.strides() && entry.copy.device() == weight.device()) {
      memory = entry.copy;
      entry.writer = Writer::renewal;
      entry.state = State::wrong;
    }
  }
  at::Tensor copy = copied(weight, low, std::move(memory));
  if (entries_.size() >= sweep_at_) {
    sweep();
  }
  found = entries_.find(key);
  if (changes_ != changes) {  // the copy may be of earlier values: only this call uses it
    if (found != entries_.end() && found->second.copy.is_same(copy)) {
      found->second.writer = Writer::none;
    }
    return copy;
  }
  if (found == entries_.end()) {
    found = entries_.emplace(key, Entry{WeakImpl(weight.getIntrusivePtr())}).first;
  }
  Entry& entry = found->second;
  // Both at once: freeing one lets other threads run, and they could leave an alias of the replaced copy.
  std::pair<Alias, Alias> const discarded{std::move(entry.connected), std::move(entry.plain)};
  at::Tensor const replaced = std::exchange(entry.copy, copy);
  entry.version = version;
  entry.copy_version = version_of(copy);
  entry.address = address;
  entry.state = State::current;
  entry.writer = Writer::none;
  return copy;
}

void WeightCache::sweep() {
  std::vector<Entry> discarded;
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->second.weight.expired()) {
      discarded.push_back(std::move(it->second));
      it = entries_.erase(it);
    } else {
      ++it;
    }
  }
  sweep_at_ = 2 * entries_.size() + 64;
}

}  // namespace amp_engine::patch

// A watched storage records whether a pointer for writing into its memory has been requested since. torch calls a
// storage's materializer, and clears it, before it gives out such a pointer: to an operator, numpy, DLPack, a
// collective, another extension, or data_ptr(). Before torch 2.13, copy-on-write memory with one owner does the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/core/impl/COW.h>
#include <torch/version.h>

#if __has_include(<c10/core/StorageMaterializer.h>)
#define AMP_HAS_MATERIALIZER 1
#else
#define AMP_HAS_MATERIALIZER 0
#endif

// Later versions of torch plan lazy clones that know their stream, and that raise if they are written on another stream
// or in a capture. With these versions no lazy clone is made.
#define AMP_HAS_LAZY_CLONES (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR <= 15)

namespace amp_engine {

inline c10::StorageImpl& storage_of(c10::Storage const& storage) { return *storage.unsafeGetStorageImpl(); }

inline c10::StorageImpl& storage_of(at::Tensor const& t) { return storage_of(t.unsafeGetTensorImpl()->unsafe_storage()); }

inline bool is_watched(c10::StorageImpl const& storage) {
#if AMP_HAS_MATERIALIZER
  return storage.has_materializer();
#else
  return c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
#endif
}

inline void handed_out(c10::StorageImpl*) {}  // torch clears a materializer that it calls, and that is the record

// True if the memory has no other owner. Another owner may have kept a pointer into it.
inline bool is_sole(at::Tensor const& t) {
  size_t const users = t.unsafeGetTensorImpl()->unsafe_storage().use_count();
  // Once a storage has a Python object, such as torch.save creates, the two keep each other alive.
  return users == 1 || (users == 2 && storage_of(t).pyobj_slot()->has_unique_reference());
}

// Watches the storage from now on. Returns true if it is watched. Does not watch memory that has another owner, nor
// memory of numpy, of a file, or of other processes.
inline bool watch(at::Tensor const& t) {
  c10::StorageImpl& storage = storage_of(t);
  at::DataPtr const& memory = storage.data_ptr();
  bool const is_own = memory.get_context() == memory.get() || c10::impl::cow::is_cow_data_ptr(memory);
  if (!is_sole(t) || !is_own) {
    return false;
  }
#if AMP_HAS_MATERIALIZER
  if (!storage.has_materializer()) {
    storage.set_materializer(&handed_out);
  }
  return true;
#elif AMP_HAS_LAZY_CLONES
  return is_watched(storage) || c10::impl::cow::lazy_clone_storage(storage);
#else
  return false;
#endif
}

}  // namespace amp_engine

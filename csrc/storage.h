// A storage that is watched tells whether anybody has asked for its memory to write there since. torch calls and forgets
// a storage's materializer before it gives such a pointer to anybody: an operator, numpy, DLPack, a collective, another
// extension, data_ptr(). Before torch 2.13 copy-on-write memory with one owner does as well.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/core/impl/COW.h>
#include <torch/version.h>

#if __has_include(<c10/core/StorageMaterializer.h>)
#define AMP_HAS_MATERIALIZER 1
#else
#define AMP_HAS_MATERIALIZER 0
#endif

// Later a lazy clone is to know its stream, and to raise where it is written on another one or in a capture: none is made.
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

inline void handed_out(c10::StorageImpl*) {}  // that torch calls it is all there is to it

// Nobody else has the memory, who may have kept a pointer into it.
inline bool is_sole(at::Tensor const& t) {
  size_t const users = t.unsafeGetTensorImpl()->unsafe_storage().use_count();
  // Once there was a Python object of the storage, as torch.save makes it, both keep each other.
  return users == 1 || (users == 2 && storage_of(t).pyobj_slot()->has_unique_reference());
}

// From now on, if nobody else has the memory: not numpy's, of a file, or of other processes. Whether it is watched.
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

// A storage that is watched tells whether anybody has asked for its memory to write there since. torch calls and forgets
// a storage's materializer before it gives such a pointer to anybody: an operator, numpy, DLPack, a collective, another
// extension, data_ptr(). Before torch 2.13 copy-on-write memory with one owner does as well.
#pragma once

#include <ATen/ATen.h>

#if __has_include(<c10/core/StorageMaterializer.h>)
#define AMP_HAS_MATERIALIZER 1
#else
#define AMP_HAS_MATERIALIZER 0
#include <c10/core/impl/COW.h>
#endif

namespace amp_engine {

inline c10::StorageImpl& storage_of(at::Tensor const& t) {
  return *t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

inline bool is_watched(c10::StorageImpl const& storage) {
#if AMP_HAS_MATERIALIZER
  return storage.has_materializer();
#else
  return c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
#endif
}

}  // namespace amp_engine

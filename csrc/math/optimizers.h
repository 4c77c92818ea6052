// Which optimizers there are, for all that goes through them: kinds, tables, launches, hyperparameters.
#pragma once

#include <type_traits>

#include "adagrad.h"
#include "adam.h"
#include "halves.h"
#include "lamb.h"
#include "novograd.h"
#include "sgd.h"

// X(name, type): the name in Python, and the type with the arithmetic. These go over each element once.
#define AMP_ONE_STAGE_OPTIMIZERS(X) \
  X(adam, Adam)                     \
  X(sgd, Sgd)                       \
  X(adagrad, Adagrad)               \
  X(novograd, NovoGrad)

// LAMB goes twice, for the norm of the step. It is the last one.
#define AMP_OPTIMIZERS(X)     \
  AMP_ONE_STAGE_OPTIMIZERS(X) \
  X(lamb, LambMoments)

namespace amp_engine {

enum class Formula : int {
#define X(name, type) name,
  AMP_OPTIMIZERS(X)
#undef X
};
constexpr int kFormulas = int(Formula::lamb) + 1;

// Hyperparameters of one parameter group. `lr_on_device`, where not null, is read instead of `lr`.
struct Group {
  double lr;
  float const* lr_on_device;
  uint32_t maximize;  // the gradient is negated
  union {             // of the optimizer
#define X(name, type) type::Hyper name;
    AMP_OPTIMIZERS(X)
#undef X
  };
};

template <class Update>
struct HyperOf;
#define X(name, type)                                                                     \
  template <>                                                                             \
  struct HyperOf<type> {                                                                  \
    static AMP_HD type::Hyper const& in(Group const& group) { return group.name; }        \
    static AMP_HD type::Hyper& in(Group& group) { return group.name; }                    \
  };
AMP_OPTIMIZERS(X)
#undef X

// Whether moments may be bfloat16.
template <class Update>
constexpr bool kNarrowState = std::is_same_v<Update, Adam>;

// `call(type{})` for the type of `formula`. On the host.
template <class Call>
auto with_optimizer(Formula formula, Call const& call) {
  switch (formula) {
#define X(name, type) \
  case Formula::name:    \
    return call(type{});
    AMP_ONE_STAGE_OPTIMIZERS(X)
#undef X
    case Formula::lamb:
      break;
  }
  return call(LambMoments{});
}

}  // namespace amp_engine

// The list of optimizers. Formulas, tables, kernel launches and hyperparameters are generated from it.
#pragma once

#include <type_traits>

#include "adagrad.h"
#include "adam.h"
#include "blocks.h"
#include "halves.h"
#include "lamb.h"
#include "novograd.h"
#include "sgd.h"

// X(name, type): the name in Python, and the type that has the arithmetic. These visit each element once.
#define AMP_ONE_STAGE_OPTIMIZERS(X) \
  X(adam, Adam)                     \
  X(sgd, Sgd)                       \
  X(adagrad, Adagrad)               \
  X(novograd, NovoGrad)

// LAMB visits each element twice, because it needs the norm of the step. It must be the last one.
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

// Hyperparameters of one parameter group.
struct Group {
  double lr;
  float const* lr_on_device;  // of a GPU; if not null, it replaces `lr`
  uint32_t maximize;          // the gradient is negated
  union {                     // of the group's optimizer
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

// True if moments may be bfloat16, or in blocks.
template <class Update>
constexpr bool kNarrowState = std::is_same_v<Update, Adam> || std::is_same_v<Update, Sgd>;

// Returns `call(type{})` for the type of `formula`. On the host only.
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

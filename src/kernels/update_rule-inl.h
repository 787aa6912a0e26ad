// The update rules of the step tail, one text for the processor's vectors and for single elements on a device. Included
// once in each namespace that has a Number, its arithmetic (set, add, multiply, divide, root, negate, fma, lerp,
// not_below, zero_below, sign), and OXY_UPDATE_RULE, what stands before a function there.

/// State as it is kept: a moving average of a number whose gradient has become 0 would stay at the least denormal one
/// for good, and arithmetic on those takes processors 10 to 100 times as long.
OXY_UPDATE_RULE Number kept(Number average) { return zero_below(average, set(0x1p-126F)); }
/// Of squares: their root is lost beside `eps` then, where that is not 0 or nearly so.
OXY_UPDATE_RULE Number kept_square(const Coefficients& c, Number square) {
  return zero_below(square, set(c.eps >= 1e-15F ? 0x1p-126F : 0));
}

/// One step: `grad` is multiplied and limited already. `state` gives the number's state by get<i>(), takes it by
/// put<i>() and says by has<i>() whether there is what may be absent. Gives the new weight. `first`: Sgd's buffer is
/// not yet filled.
template <device::Family kFamily, class State>
OXY_UPDATE_RULE Number updated(const Coefficients& c, Number weight, Number grad, const State& state, bool first,
                               bool nesterov) {
  using device::Family;
  if (c.weight_decay != 0) grad = fma(set(c.weight_decay), weight, grad);
  if (c.decay != 0) weight = fma(set(-c.decay), weight, weight);
  Number change = grad;
  if constexpr (kFamily == Family::Adam) {
    const Number average = kept(lerp(state.template get<0>(), grad, c.one_minus_beta1));
    Number square = fma(multiply(set(c.one_minus_beta2), grad), grad, multiply(set(c.beta2), state.template get<1>()));
    square = kept_square(c, square);
    state.template put<0>(average);
    state.template put<1>(square);
    if (state.template has<2>()) {
      square = not_below(square, state.template get<2>());
      state.template put<2>(square);
    }
    change = divide(average, fma(root(square), set(c.inv_sqrt_correction2), set(c.eps)));
  } else if constexpr (kFamily == Family::Sgd) {
    if (state.template has<0>()) {
      const Number moved = first ? set(0) : multiply(set(c.momentum), state.template get<0>());
      const Number buffer = kept(fma(set(c.one_minus_dampening), grad, moved));
      state.template put<0>(buffer);
      change = nesterov ? fma(set(c.momentum), buffer, grad) : buffer;
    }
  } else if constexpr (kFamily == Family::Lion) {
    const Number average = state.template get<0>();
    state.template put<0>(lerp(average, grad, c.one_minus_beta2));  // its sign counts, however small it is
    change = sign(lerp(average, grad, c.one_minus_beta1));
  } else if constexpr (kFamily == Family::Adagrad) {
    const Number sum = fma(grad, grad, state.template get<1>());
    state.template put<1>(sum);
    change = divide(grad, add(root(sum), set(c.eps)));
  } else {
    Number square = fma(multiply(set(c.one_minus_beta2), grad), grad, multiply(set(c.beta2), state.template get<1>()));
    square = kept_square(c, square);
    state.template put<1>(square);
    if (state.template has<2>()) {
      const Number average = kept(lerp(state.template get<2>(), grad, c.one_minus_beta2));
      state.template put<2>(average);
      square = not_below(fma(negate(average), average, square), set(0));
    }
    change = divide(grad, add(root(square), set(c.eps)));
    if (state.template has<0>()) {
      change = kept(fma(set(c.momentum), state.template get<0>(), change));
      state.template put<0>(change);
    }
  }
  return fma(set(-c.step_size), change, weight);
}

"""How weights enter the outputs: certified uses, whose outer products are the gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cases
import linlap as ll
from fitted import close
from linlap.uses.coverage import understood
from linlap.uses.gradients import Gradients
from linlap.uses.outer import Outer, Tokens, together


class Attends(nn.Module):
    """Attention over a sequence with a token and positions of its own, laid out with the batch first or second."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.attention(x, x, x)[0]
        return self.head(self.norm(y if self.batch_first else y.transpose(0, 1))[:, 0])


class Spelt(nn.Module):
    """A matrix product in every spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(4, 4)) for _ in range(4))
        self.shift, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.a)
        x = torch.tanh(torch.matmul(x, self.b.T) * self.scale)
        x = torch.tanh(torch.addmm(self.shift, x, self.c))
        return F.linear(x, self.d.t()) - self.shift


class Twice(nn.Module):
    """One layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Table(nn.Module):
    """A table, tied to the head or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens)).mean(1))


class Slices(nn.Module):
    """A matrix taken apart, which nobody watches."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.head = nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.both.chunk(2)
        return self.head(torch.tanh(F.linear(x, one)) + F.linear(x, other))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, dilation=2, padding=2, groups=2), nn.GroupNorm(2, 6),
        nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, groups=2), nn.Flatten(), nn.Linear(400, 3),
    )  # fmt: skip


def sequences() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 4, 3, groups=4, padding="same"), nn.Tanh(), nn.ConvTranspose1d(4, 3, 2, dilation=2), nn.Flatten(),
        nn.Linear(33, 3),
    )  # fmt: skip


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, (1, 2, 3), stride=(1, 2, 1)), nn.Flatten(), nn.Linear(36, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(40, 2))


NETWORKS = {
    "convolutions": (convolutions, (5, 2, 8, 8), set()),
    "sequences": (sequences, (5, 4, 9), set()),
    "volumes": (volumes, (3, 1, 3, 4, 5), set()),
    "attention": (Attends, (4, 5, 8), {"token"}),
    "attention, batch second": (lambda: Attends(False), (4, 5, 8), {"token"}),
    "encoder": (encoder, (4, 5, 8), set()),
    "spellings": (Spelt, (4, 4), set()),
    "twice": (Twice, (4, 5), set()),
    "table": (lambda: Table(tied=False), None, set()),
    "tied table": (lambda: Table(tied=True), None, {"table.weight"}),
    "slices": (Slices, (4, 4), {"both"}),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def made(name: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        build, shape, _ = NETWORKS[name]
        x = torch.randint(0, 11, (4, 7)) if shape is None else torch.randn(shape).double()
        return build().double().eval(), x


@every_network
def test_every_weight_is_understood_but_those_whose_uses_are_not_seen(name):
    net, x = made(name)
    linearised = ll.linearise(net)
    assert set(linearised.network.weights) - set(understood(linearised, x).weights) == NETWORKS[name][2]


@every_network
def test_gradients_are_rows_of_the_jacobian(name):
    """Of every output of every example, for all weights, understood or not."""
    net, x = made(name)
    linearised = ll.linearise(net)
    jacobian = linearised.jacobian(x)
    gradients = Gradients(linearised, x, understood(linearised, x))
    identity = torch.eye(jacobian.shape[1]).double().expand(len(x), -1, -1)
    for c, terms in enumerate(gradients.columns(identity)):
        parts = {k: torch.cat([part for _, part in term.gradients()]).flatten(1) for k, term in terms.items()}
        close(torch.cat([parts[k] for k in linearised.network.layout.shapes], 1), jacobian[:, c], 1e-10)


@every_network
def test_watching_changes_nothing(name):
    net, x = made(name)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    outputs = net(x)
    understood(ll.linearise(net), x)
    assert torch.equal(net(x), outputs)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert F.has_torch_function is torch.overrides.has_torch_function


@cases.every(list(cases.CASES.values()))
def test_certificates_hold_in_the_registry(case):
    net, x, *_ = case.make()
    linearised = ll.linearise(net)
    coverage = understood(linearised, x[:4])
    jacobian = linearised.jacobian(x[:5])
    gradients = Gradients(linearised, x[:5], coverage)
    u = torch.randn(len(jacobian), 1, jacobian.shape[1], generator=torch.Generator().manual_seed(0)).double()
    (terms,) = gradients.columns(u)
    parts = {k: torch.cat([part for _, part in term.gradients()]).flatten(1) for k, term in terms.items()}
    wanted = (u @ jacobian)[:, 0]
    close(torch.cat([parts[k] for k in linearised.network.layout.shapes], 1), wanted, 1e-8)


# --- sums of outer products


def outer(places: int) -> Outer:
    generator = torch.Generator().manual_seed(places)
    return Outer(*(torch.randn(5, places, 2, d, generator=generator).double() for d in (3, 4)))


@pytest.mark.parametrize("places", [1, 3])
def test_sums_of_squares_need_no_gradients_in_memory(places):
    term, weight = outer(places), torch.rand(2, 3, 4).double()
    whole = torch.cat([part for _, part in term.gradients()])
    close(whole, torch.einsum("ntgl,ntgr->nglr", term.left, term.right), 1e-12)
    close(term.squares(), whole.square().sum(0), 1e-12)
    close(term.quadratic(weight), (whole.square() * weight).sum((1, 2, 3)), 1e-12)
    close(torch.cat([part for _, part in term.flat().gradients()]).flatten(1), whole.flatten(1), 1e-12)
    close(
        together([term, outer(2)]).squares(),
        (whole + torch.cat([p for _, p in outer(2).gradients()])).square().sum(0),
        1e-12,
    )


def test_tokens_that_come_twice_add_up_before_they_are_squared():
    tokens, right = torch.tensor([[0, 2, 0], [1, 1, 1]]), torch.randn(2, 3, 1, 4).double()
    term, weight = Tokens(tokens, right, 3), torch.rand(1, 3, 4).double()
    whole = torch.cat([part for _, part in term.gradients()])
    close(whole[0, 0, 0], right[0, 0, 0] + right[0, 2, 0], 1e-12)
    close(term.squares(), whole.square().sum(0), 1e-12)
    close(term.quadratic(weight), (whole.square() * weight).sum((1, 2, 3)), 1e-12)
    assert together([term, outer(1)]) is None
